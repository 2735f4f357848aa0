"""The rows of the methods table: routes, and one golden loss each."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from saki_jax.train.baselines import METHODS, STUDENT_ONLY, Extras
from saki_jax.train.objective import Objective
from saki_jax.train.state import init_state
from saki_jax.train.update import make_update
from train_toys import KEY, bigram, make_rollout

V = 8
LOG_V = float(np.log(V))
GUIDED = [name for name, method in METHODS.items() if method.rollout != STUDENT_ONLY]


def guided_rollout(rows=64, width=12, seed=0, tv=None):
    """Rows of all lengths, about a quarter of the tokens corrected."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, width + 1, rows)
    responses = [rng.integers(0, V, n).tolist() for n in lengths]
    rollout = make_rollout(
        [[1]] * rows,
        responses,
        log_p=[rng.normal(-2, 0.3, n).tolist() for n in lengths],
        log_t=[rng.normal(-2, 0.3, n).tolist() for n in lengths],
        corrected=[(rng.random(n) < 0.25).tolist() for n in lengths],
        teacher_mode=[rng.integers(0, V, n).tolist() for n in lengths],
        nonfinite=[i == 5 for i in range(rows)],
        width=width,
    )
    sample = jnp.where(rollout.corrected, (rollout.teacher_mode + 1) % V, 0)
    weights = rng.random(rollout.tokens.shape) if tv is None else tv
    return rollout.replace(teacher_sample=sample, tv=jnp.asarray(weights, jnp.float32))


@pytest.mark.parametrize("name", sorted(METHODS))
def test_a_route_distils_valid_positions_only_and_names_tokens(name):
    rollout = guided_rollout()
    routed = METHODS[name].route(rollout, KEY)
    assert not (routed.distilled & ~routed.valid).any()
    assert not routed.valid[5].any()
    assert routed.valid.sum() == rollout.length.sum() - rollout.length[5]
    assert ((routed.target >= 0) & (routed.target < V)).all()
    kept = routed.valid & ~routed.distilled
    assert (jnp.where(kept, routed.target - rollout.tokens, 0) == 0).all()


@pytest.mark.parametrize("name", ["saki", "random_tm", "tv_weighted_tm", "teacher_sampled"])
def test_equal_budgets_in_every_row(name):
    rollout = guided_rollout()
    routed = METHODS[name].route(rollout, KEY)
    budget = (rollout.corrected & routed.valid).sum(1)
    assert budget.sum() > 50
    np.testing.assert_array_equal(routed.distilled.sum(1), budget)


def test_where_and_what():
    rollout = guided_rollout()
    saki, sampled = (METHODS[n].route(rollout, KEY) for n in ("saki", "teacher_sampled"))
    np.testing.assert_array_equal(saki.distilled, rollout.corrected & saki.valid)
    np.testing.assert_array_equal(sampled.distilled, saki.distilled)
    at = np.asarray(saki.distilled)
    np.testing.assert_array_equal(saki.target[at], rollout.teacher_mode[at])
    np.testing.assert_array_equal(sampled.target[at], rollout.teacher_sample[at])
    for name in ("random_tm", "tv_weighted_tm"):
        routed = METHODS[name].route(rollout, KEY)
        assert (routed.distilled != saki.distilled).any()
        at = np.asarray(routed.distilled)
        np.testing.assert_array_equal(routed.target[at], rollout.teacher_mode[at])
    for name in ("trb", "opd", "exopd"):
        assert not METHODS[name].route(rollout, KEY).distilled.any()


def test_placement_depends_on_the_key_and_on_nothing_in_the_batch_around():
    rollout = guided_rollout()
    for name in ("random_tm", "tv_weighted_tm"):
        route = METHODS[name].route
        first = route(rollout, KEY)
        assert (first.distilled != route(rollout, jax.random.key(1)).distilled).any()
        order = jnp.arange(64)[::-1]
        turned = jax.tree.map(lambda x, order=order: x[order] if x.ndim else x, rollout)
        np.testing.assert_array_equal(route(turned, KEY).distilled[::-1], first.distilled)


def placements(name, tv, length, budget, rows=20_000):
    """How often each position of a row with these weights is chosen."""
    corrected = [[True] * budget + [False] * (length - budget)] * rows
    rollout = make_rollout([[1]] * rows, [[2] * length] * rows, corrected=corrected)
    rollout = rollout.replace(tv=jnp.broadcast_to(jnp.asarray(tv, jnp.float32), (rows, length)))
    chosen = METHODS[name].route(rollout, KEY).distilled
    assert (chosen.sum(1) == budget).all()
    return np.asarray(chosen.mean(0))


def successive_inclusion(weights, budget):
    """Exact inclusion probabilities of drawing one after the other, weights renormalised."""
    found = np.zeros(len(weights))
    for order in itertools.permutations(range(len(weights)), budget):
        p, left = 1.0, sum(weights)
        for i in order:
            p, left = p * weights[i] / left, left - weights[i]
        found[list(order)] += p
    return found


def tolerance(p, rows=20_000):
    """Five standard errors: for 10 numbers the chance of a false alarm is below 1e-5."""
    return 5 * np.sqrt(p * (1 - p) / rows) + 1e-9


def test_random_tm_is_uniform():
    found = placements("random_tm", [0.1] * 5, 5, 2)
    assert (abs(found - 0.4) < tolerance(0.4)).all()


def test_tv_weighted_tm_follows_the_law_of_the_exponential_race():
    weights = [0.5, 0.2, 0.2, 0.05, 0.05]
    exact = successive_inclusion(weights, 2)
    found = placements("tv_weighted_tm", weights, 5, 2)
    assert (abs(found - exact) < tolerance(exact)).all()
    # Inclusion proportional to the weights, a mistake one could make, would be seen.
    wrong = 2 * np.array(weights)
    assert (abs(found - wrong) > tolerance(exact)).any()


def test_tv_weighted_tm_fills_up_uniformly():
    found = placements("tv_weighted_tm", [0.3, 0.0, 0.0, 0.0], 4, 2)
    assert found[0] == 1.0
    assert (abs(found[1:] - 1 / 3) < tolerance(1 / 3)).all()


def golden(name, **objective):
    """Loss of a row of four tokens under uniform log-probabilities, ratio 1."""
    rollout = make_rollout(
        [[1]],
        [[2, 3, 4, 5]],
        log_p=[[-LOG_V] * 4],
        log_t=[[-LOG_V + x for x in (0.5, -1.0, 2.0, -20.0)]],
        corrected=[[False, False, True, False]],
        teacher_mode=[[0, 0, 7, 0]],
    ).replace(tv=jnp.asarray([[0.0, 0.0, 0.2, 0.0]]), teacher_sample=jnp.asarray([[0, 0, 6, 0]]))
    log_ref = rollout.log_t - jnp.asarray([[0.4, 0.4, 0.4, 0.4]])
    update = make_update(bigram(V), METHODS[name], Objective(**objective), optax.sgd(1.0))
    params = {"table": jnp.zeros((V, V), jnp.float32)}
    return update(init_state(params, optax.sgd(1.0)), rollout, KEY, Extras(log_ref=log_ref))


# With ratio 1 a surrogate token costs log pi - log T, cut to 10: here -0.5, 1, -2 and 10.
GOLDEN = {
    "saki": (-0.5 + 1.0 + LOG_V + 10.0) / 4,
    "trb": (-0.5 + 1.0 - 2.0 + 10.0) / 4,
    "opd": (-0.5 + 1.0 - 2.0 + 10.0) / 4,
    "teacher_sampled": (-0.5 + 1.0 + LOG_V + 10.0) / 4,
    "tv_weighted_tm": (-0.5 + 1.0 + LOG_V + 10.0) / 4,
    # A = (log T - log pi) + 0.25 * 0.4, then cut.
    "exopd": (-0.6 + 0.9 - 2.1 + 10.0) / 4,
}


@pytest.mark.parametrize("name", sorted(GOLDEN))
def test_golden_loss(name):
    _, stats = golden(name)
    np.testing.assert_allclose(stats["loss"], GOLDEN[name], rtol=1e-6)
    surrogate_tokens = stats["num_valid"] * (1 - stats["teacher_mode_rate"])
    np.testing.assert_allclose(stats["k1_clamp_rate"] * surrogate_tokens, 1.0, rtol=1e-6)


def test_golden_loss_of_random_tm_is_one_of_four():
    _, stats = golden("random_tm")
    costs = np.array([-0.5, 1.0, -2.0, 10.0])
    possible = [(costs.sum() - cost + LOG_V) / 4 for cost in costs]
    assert np.isclose(stats["loss"], possible, rtol=1e-6).sum() == 1


def test_teacher_sampled_trains_the_sample_and_not_the_mode():
    state, _ = golden("teacher_sampled")
    table = state.params["table"]
    assert table[3, 6] > table[3, 7]


def test_exopd_at_strength_1_is_opd_to_the_bit():
    (one, stats), (other, expected) = golden("exopd", extrapolation=1.0), golden("opd")
    assert stats["loss"] == expected["loss"]
    np.testing.assert_array_equal(one.params["table"], other.params["table"])
