"""The comparison in the small: its runs, and what is made of them."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import replicate_small
from replication import probes, runs, statistics
from scipy import stats

from saki_jax.evals.probe_file import Probe
from saki_jax.evals.probe_measure import FIGURES
from saki_jax.train import __main__ as train


def arguments(checkpoints, out: Path, *more: str) -> list[str]:
    """Two methods, one seed, three steps of random models."""
    student, teacher = checkpoints
    settings = {"student": student, "teacher": teacher, "steps": 3, "mesh.data": 1}
    settings |= {"epsilon.zero_at": 3, "data.prompts_per_step": 4, "data.samples": 2}
    settings |= {"rollout.response_length": 12, "rollout.block_size": 4}
    settings |= {"eval.response_length": 8, "eval.problems": 6, "eval.samples": 2}
    return [
        *("--methods", "saki,trb", "--seeds", "1", "--positions", "6"),
        *("--workdir", str(out / "work"), "--out", str(out / "doc.md")),
        *(f"--config.{key}={value}" for key, value in settings.items()),
        *more,
    ]


def check_documents(out: Path) -> None:
    found = json.loads((out / "doc.json").read_text())
    assert (found["methods"], found["seeds"]) == (["saki", "trb"], [0])
    assert set(found["scores"]["mean"]["difference"]) == {"trb"}
    guided = found["phases"]["saki"][0]
    assert guided["corrections"] > 0
    assert guided["tv"] <= guided["bound"]
    assert guided["teacher_mode"] == pytest.approx(guided["corrections"], rel=1e-4)
    assert found["phases"]["trb"][0]["teacher_mode"] == 0
    assert [phase["steps"] for phase in found["phases"]["trb"]] == [[1, 1], [2, 2], [3, 3]]
    for group in ("corrected", "accepted"):
        figures = found["probe"]["groups"][group]
        for told in (figures["c1"]["before"], figures["c16"]["after"]["trb"]):
            assert 0 <= told["low"] <= told["value"] <= told["high"] <= 100
    text = (out / "doc.md").read_text()
    assert "| SAKI |" in text
    assert "Minus SAKI" in text
    assert str(out) not in text + json.dumps(found)


def no_probe(plan, epsilon: float, positions: int):
    """In place of the probe, which compiles as much as the runs: eight positions, four prompts."""
    n = np.arange(8)
    figures = {name: np.full(8, 0.25, np.float32) for name in FIGURES}
    probe = Probe(
        tokens=np.zeros(8, np.int32), offset=np.array([0, 8]), row=0 * n, prefix=n + 1, position=n,
        corrected=n % 2 == 0, partner=n ^ 1, prompt=n // 2, prompt_ids=np.array(list("abcd")),
        initial=figures, meta={"epsilon": epsilon},
    )  # fmt: skip
    return probe, dict.fromkeys(plan.pairs(), figures)


@pytest.mark.slow
def test_two_methods_from_runs_to_document_and_again_without_running(
    checkpoints, tmp_path, monkeypatch
):
    monkeypatch.setattr(probes, "measure_all", no_probe)
    ran = []

    def here(plan, method, seed):
        ran.append((method, seed))
        train.main(plan.command(method, seed)[3:])

    monkeypatch.setattr(runs, "_run", here)
    assert replicate_small.main(arguments(checkpoints, tmp_path, "--jobs", "1")) == 0
    check_documents(tmp_path)
    first = (tmp_path / "doc.json").read_text()
    assert replicate_small.main(arguments(checkpoints, tmp_path, "--jobs", "1")) == 0
    assert ran == [("saki", 0), ("trb", 0)]
    assert (tmp_path / "doc.json").read_text() == first


@pytest.mark.slow
def test_the_runs_as_processes_two_at_a_time(checkpoints, tmp_path):
    assert replicate_small.main(arguments(checkpoints, tmp_path)) == 0
    check_documents(tmp_path)


def test_a_run_that_fails_is_told_with_its_last_words(checkpoints, tmp_path, capsys):
    wrong = arguments(checkpoints, tmp_path, "--jobs", "1", "--config.objective.dual_clip=0.5")
    assert replicate_small.main(wrong) == 1
    told = capsys.readouterr().err
    assert "saki, seed 0 ended with status 1" in told
    assert "objective.dual_clip is 0.5; it must be at least 1" in told
    assert "trb" not in told  # nothing more was begun
    assert not (tmp_path / "doc.md").exists()


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (["--methods", "saki,sake"], "expected some of saki"),
        (["--seeds", "0"], "at least 1"),
        (["--steps=3"], "look like --config.key=value"),
    ],
)
def test_wrong_options_are_told(wrong, told, capsys):
    with pytest.raises(SystemExit):
        replicate_small.parse(["--workdir", "nowhere", *wrong])
    assert told in capsys.readouterr().err


def two_way(rng, seeds, problems, spread_seed, spread_problem, noise, columns=1):
    shape = (seeds, problems, columns)
    return (
        spread_seed * rng.normal(size=(seeds, 1, columns))
        + spread_problem * rng.normal(size=(1, problems, columns))
        + noise * rng.normal(size=shape)
    )


def test_the_spread_of_the_draws_is_that_of_seeds_and_problems():
    """Var = a²/S + b²/n when nothing else varies; 400 repetitions put its mean within 10 %."""
    rng = np.random.default_rng(0)
    draws = statistics.crossed_draws
    for a, b in ((1.0, 0.0), (0.0, 1.0), (0.3, 1.0)):
        found = [
            draws(two_way(rng, 3, 25, a, b, 0.0), resamples=300, seed=i).var() for i in range(400)
        ]
        assert np.mean(found) == pytest.approx(a**2 / 3 + b**2 / 25, rel=0.15)


def test_a_difference_is_paired_by_problem_and_by_seed():
    rng = np.random.default_rng(1)
    shared = two_way(rng, 4, 30, 5.0, 5.0, 1.0)
    values = np.concatenate([shared, shared + 2.0], axis=2)
    draws = statistics.crossed_draws(values, resamples=50)
    np.testing.assert_allclose(draws[:, 1] - draws[:, 0], 2.0, atol=1e-9)
    assert draws[:, 0].std() > 1.0


def test_a_single_seed_leaves_the_problems():
    rng = np.random.default_rng(2)
    values = two_way(rng, 1, 400, 0.0, 2.0, 0.0)
    draws = statistics.crossed_draws(values, resamples=2000)
    assert draws.std() == pytest.approx(values.std() / 20, rel=0.1)


def test_the_smallest_difference_is_found_four_times_in_five():
    """Differences of that size, between seeds alone, tested by t: the power is 0.8 by its law."""
    rng = np.random.default_rng(3)
    smallest, sigma = statistics.smallest_difference, 1.5
    sizes = [smallest(two_way(rng, 3, 50, sigma, 0.0, 0.0, columns=7)) for _ in range(30)]
    law, error = stats.t(14), sigma / np.sqrt(3)
    assert np.mean(sizes) == pytest.approx((law.ppf(0.975) + law.ppf(0.8)) * error, rel=0.15)


def test_methods_are_run_seed_by_seed(tmp_path):
    plan = runs.Plan(Path("c.py"), ("a", "b"), (0, 1), tmp_path)
    assert list(plan.pairs()) == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    command = plan.command("a", 1)
    assert command[:3] == [sys.executable, "-m", "saki_jax.train"]
    assert command[3:5] == ["--config=c.py:a", "--config.seed=1"]
