"""Coverage, pairing and clustering of the bootstrap, each beside a wrong method that fails."""

import doctest

import numpy as np
import pytest
from scipy import stats

from saki_jax.evals import bootstrap
from saki_jax.evals.bootstrap import (
    cluster_means,
    macro_interval,
    mean_interval,
    paired_difference,
    paired_macro_difference,
    percentile_interval,
    resampled_means,
    smallest_detectable,
)

TRIALS = 250
PROBLEMS, SAMPLES = 60, 8


def test_docstrings():
    assert doctest.testmod(bootstrap).failed == 0


def problem_difficulties(rng: np.random.Generator, problems: int = PROBLEMS) -> np.ndarray:
    """Chances of a right answer, far apart as those of real problems are."""
    return rng.beta(0.4, 0.8, problems)


def coverage(wrong: bool) -> int:
    """In how many of TRIALS data sets the 95 % interval of Mean@8 covers the true mean.

    The wrong method takes the 8 samples of a problem for independent observations.
    """
    rng = np.random.default_rng(5)
    truth = 0.4 / 1.2
    covered = 0
    for trial in range(TRIALS):
        right = rng.binomial(1, problem_difficulties(rng)[:, None], (PROBLEMS, SAMPLES))
        values = right.reshape(-1) if wrong else right.mean(1)
        found = mean_interval(values, resamples=500, seed=trial)
        covered += found.low <= truth <= found.high
    return covered


def test_intervals_cover_as_often_as_they_say():
    # True coverage of the percentile method at 60 problems is about 0.94; a right method leaves
    # these bounds with a probability below 1e-5.
    low = stats.binom.ppf(1e-6, TRIALS, 0.935)
    high = stats.binom.ppf(1 - 1e-6, TRIALS, 0.955)
    assert low <= coverage(wrong=False) <= high
    # The wrong method covers in about 60 % of the cases: far below, as it must be.
    assert coverage(wrong=True) < low


def paired_runs(rng: np.random.Generator, effect: float) -> tuple[dict, dict]:
    """Two runs on the same problems, one better by `effect` in chance."""
    chance = np.clip(problem_difficulties(rng), 0.0, 1.0 - effect)
    runs = [rng.binomial(SAMPLES, chance + shift) / SAMPLES for shift in (effect, 0.0)]
    return tuple({f"p{i}": v for i, v in enumerate(run)} for run in runs)


def test_paired_difference_covers_and_is_narrower_than_unpaired():
    rng = np.random.default_rng(11)
    covered, paired_found, unpaired_found = 0, 0, 0
    for trial in range(TRIALS):
        better, worse = paired_runs(rng, effect=0.06)
        found = paired_difference(better, worse, resamples=500, seed=trial)
        covered += found.low <= 0.06 <= found.high
        paired_found += found.low > 0
        # The wrong method redraws the problems of the two runs apart from one another.
        draws = [
            resampled_means(np.array(list(run.values()))[:, None], resamples=500, seed=(trial, i))
            for i, run in enumerate((better, worse))
        ]
        unpaired_found += percentile_interval(0.0, (draws[0] - draws[1])[:, 0], 60).low > 0
    assert (
        stats.binom.ppf(1e-6, TRIALS, 0.935) <= covered <= stats.binom.ppf(1 - 1e-6, TRIALS, 0.96)
    )
    # Pairing sees an effect of 6 points in most trials, the unpaired method nearly never.
    assert paired_found > 0.6 * TRIALS
    assert unpaired_found < 0.1 * TRIALS


def test_no_difference_is_seldom_called_one():
    rng = np.random.default_rng(13)
    false = 0
    for trial in range(TRIALS):
        found = paired_difference(*paired_runs(rng, effect=0.0), resamples=500, seed=trial)
        false += not found.low <= 0.0 <= found.high
    # Nominal 5 %, in truth about 6 % at 60 problems; failure probability of the bound below 1e-6.
    assert false <= stats.binom.ppf(1 - 1e-6, TRIALS, 0.065)


def test_resamples_have_the_bootstrap_law():
    # Mean and variance of the redrawn mean are known: the sample mean, and var / n with ddof 0.
    values = np.random.default_rng(0).normal(size=40)
    draws = resampled_means(values[:, None], resamples=20_000, seed=1)[:, 0]
    error = values.std() / np.sqrt(40)
    assert abs(draws.mean() - values.mean()) < 5 * error / np.sqrt(20_000)
    assert draws.std() == pytest.approx(error, rel=5 / np.sqrt(2 * 20_000))


def test_resampling_is_the_same_for_all_columns_and_any_chunk(monkeypatch):
    values = np.random.default_rng(0).normal(size=(30, 3))
    whole = resampled_means(values, resamples=50, seed=3)
    np.testing.assert_allclose(
        whole[:, :1] - whole[:, 1:2],
        resampled_means((values[:, :1] - values[:, 1:2]), resamples=50, seed=3),
        atol=1e-12,
    )
    monkeypatch.setattr(bootstrap, "_CHUNK", 70)
    np.testing.assert_allclose(resampled_means(values, resamples=50, seed=3), whole, atol=1e-12)


def test_prompts_weigh_equally_however_many_positions_they_have():
    names = ["long"] * 9 + ["short"]
    values = np.array([0.0] * 9 + [1.0])
    _, means = cluster_means(names, values)
    assert mean_interval(means, resamples=100).value == 0.5
    assert values.mean() == pytest.approx(0.1)  # what a mean over positions would say


def test_values_that_are_not_there_are_left_out():
    nan = np.nan
    _, means = cluster_means(["a", "a", "b"], np.array([[1.0, nan], [3.0, nan], [nan, 7.0]]))
    np.testing.assert_array_equal(means, [[2.0, nan], [nan, 7.0]])
    draws = resampled_means(means, resamples=400, seed=0)
    assert set(draws[~np.isnan(draws[:, 0]), 0]) == {2.0}
    # A redraw of two clusters misses a given one in a quarter of the cases.
    missing = int(np.isnan(draws[:, 0]).sum())
    assert stats.binom.ppf(1e-6, 400, 0.25) <= missing <= stats.binom.ppf(1 - 1e-6, 400, 0.25)


def test_d07_pairing_is_by_id_and_blind_to_order():
    mine = {"a": 1.0, "b": 0.5, "c": 0.0}
    theirs = {"c": 0.25, "a": 0.5, "b": 0.5}
    shuffled = {name: mine[name] for name in ("c", "b", "a")}
    found = paired_difference(mine, theirs, resamples=200)
    assert found == paired_difference(shuffled, theirs, resamples=200)
    assert found.value == pytest.approx(0.25 / 3)


def test_macro_average_weighs_sets_equally():
    sets = {"large": np.zeros(500), "small": np.ones(30)}
    assert macro_interval(sets, resamples=100).value == 0.5
    by_id = {name: {f"{name}{i}": v for i, v in enumerate(values)} for name, values in sets.items()}
    assert paired_macro_difference(by_id, by_id, resamples=100).value == 0.0


def test_a_set_is_redrawn_alike_whatever_its_company():
    values = np.random.default_rng(2).random(20)
    alone = macro_interval({"a": values}, resamples=300)
    beside = macro_interval({"b": np.zeros(5), "a": values}, resamples=300)
    assert beside.low == pytest.approx(alone.low / 2)


def test_refusals_name_what_differs():
    with pytest.raises(ValueError, match=r"2 of 2 and 2 .* 'b'"):
        paired_difference({"a": 0.0, "b": 1.0}, {"a": 0.0, "c": 1.0})
    with pytest.raises(ValueError, match=r"\['x'\].*\['y'\]"):
        paired_macro_difference({"x": {}}, {"y": {}})
    with pytest.raises(ValueError, match="3 cluster names for 2 values"):
        cluster_means(["a", "b", "c"], np.zeros(2))
    with pytest.raises(ValueError, match="no set"):
        macro_interval({})


def test_the_detectable_difference_is_seen_in_four_of_five():
    rng = np.random.default_rng(3)
    noise = rng.normal(size=(TRIALS, 80))
    effect = smallest_detectable(np.tile([1.0, -1.0], 40))  # a standard deviation of 1
    assert effect == pytest.approx(2.802 / np.sqrt(80), rel=0.01)
    seen = sum(
        mean_interval(row + effect, resamples=400, seed=trial).low > 0
        for trial, row in enumerate(noise)
    )
    # Power 0.8 (0.81 with the percentile method's narrower interval); bounds fail below 1e-6.
    assert stats.binom.ppf(1e-6, TRIALS, 0.79) <= seen <= stats.binom.ppf(1 - 1e-6, TRIALS, 0.83)
