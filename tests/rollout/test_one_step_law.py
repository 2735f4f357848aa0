"""One committed token follows q: exactly by summation, and in the numbers that are drawn.

Simulations use fixed seeds and bounds of 5 sigma for each token (failure probability below 1e-5 a
test); each wrong law named in the cases is rejected by the same bound.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bridge_corpus import FAMILIES, every_entry, log_softmax, pair, solve, true_log_q
from saki_jax.rollout import bridge, coupling, reference
from saki_jax.rollout.keys import Purpose, position_keys, step_key, uniform

DRAWS = 400_000
WIDE = 1e4  # a budget under which q = T


def log(*p: float) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(np.array(p, np.float64)).astype(np.float32)


@partial(jax.jit, static_argnames=("purposes", "smallest_uniform"))
def commit(logits_p, logits_t, epsilon, purposes=(0, 1, 2), smallest_uniform=False):
    """(y, z, corrected) of DRAWS coupling events at one prefix, as the engine makes them.

    ``purposes`` of draft, acceptance and residual: a wave with shared keys passes equal ones.
    """
    ids = jnp.arange(DRAWS, dtype=jnp.int32)
    draft, accept, residual = (
        position_keys(step_key(0, 1), ids, jnp.zeros_like(ids), Purpose(p)) for p in purposes
    )
    solved = bridge.solve(logits_p, logits_t, epsilon)
    rows = jax.tree.map(lambda x: jnp.broadcast_to(x, (DRAWS, *x.shape)), solved)
    p, t = (jnp.broadcast_to(x, (DRAWS, *x.shape)) for x in (logits_p, logits_t))
    z = coupling.draw(p, draft)
    x = bridge.token_terms(rows, p, t, z)[3]
    v = uniform(accept)
    v = jnp.full_like(v, 1 - 2.0**-24) if smallest_uniform else v  # u = 1 - v
    rejected = coupling.rejects(v, x)
    y, found = coupling.draw_residual(rows, p, t, residual)
    corrected = rejected & found
    return jnp.where(corrected, y, z), z, corrected


def shares(tokens, vocab: int) -> np.ndarray:
    return np.bincount(np.asarray(tokens), minlength=vocab) / len(tokens)


def follows(share: np.ndarray, law, draws: int = DRAWS) -> bool:
    law = np.asarray(law, np.float64)
    return bool((np.abs(share - law) <= 5 * np.sqrt(law * (1 - law) / draws) + 1e-12).all())


def events(p, t, epsilon=WIDE, **changes):
    return commit(jnp.asarray(p), jnp.asarray(t), jnp.float32(epsilon), **changes)


@pytest.mark.parametrize("solver", ["newton", "bisect"])
@pytest.mark.parametrize("epsilon", [0.0, 1e-6, 4e-4, 0.02, 1.0, WIDE])
def test_summed_over_all_proposals_the_law_is_q(epsilon, solver):
    """In float64 from the float32 numbers that decide: rho of each proposal, residual weights.

    Both the accepted mass p (1 - rho) and the corrections' share of it are the engine's own; the
    sum has to be the bridge of exactly that beta in extended precision.
    """
    pairs = [pair(family, 3, 300, "float32", seed=2) for family in FAMILIES]
    a, b = (np.concatenate(side) for side in zip(*pairs, strict=True))
    solved = solve(a, b, epsilon, solver)
    x = every_entry(solved, a, b)[3].astype(np.float64)
    log_p, log_t = log_softmax(a), log_softmax(b)
    p = np.exp(log_p).astype(float)
    rho = -np.expm1(np.minimum(x, 0))
    with np.errstate(over="ignore", invalid="ignore"):
        gain = np.where(x > 0, np.exp(log_p.astype(float) + x) * -np.expm1(-np.abs(x)), 0.0)
    rejected, mass = (p * rho).sum(-1), gain.sum(-1)
    share = np.divide(rejected, mass, out=np.zeros_like(mass), where=mass > 0)
    law = p * (1 - rho) + share[:, None] * gain
    q = np.exp(true_log_q(log_p, log_t, np.asarray(solved.beta))).astype(float)
    assert np.abs(law - q).sum(-1).max() < 2e-6 * max(1, epsilon**0.5)
    # Rejected mass and TV agree relatively, also where they are tiny.
    tv = np.maximum(q - p, 0).sum(-1)
    np.testing.assert_allclose(rejected, tv, rtol=2e-3, atol=1e-7)


def test_the_drawn_tokens_follow_the_reference_at_a_real_budget():
    a, b = (x[0] for x in pair("zipf", 1, 12, "float32", seed=7))
    exact = reference.solve_bridge(a, b, 0.02)
    y, z, corrected = events(a, b, 0.02)
    q, p = np.exp(exact.log_q), np.exp(exact.log_p)
    assert follows(shares(y, 12), q)
    assert follows(shares(z, 12), p)
    assert not follows(shares(z, 12), q)
    rate, tv = float(corrected.mean()), reference.total_variation(exact.log_p, exact.log_q)
    assert abs(rate - tv) < 5 * np.sqrt(tv / DRAWS)
    assert rate < np.sqrt(0.02 / 2)


def test_s01_proposal_and_acceptance_share_one_float32_p():
    drafted, teacher = np.float32([2.0078125, 2.0, 0.0, -1.0]), log(0.3, 0.3, 0.2, 0.2)
    p = [0.459580, 0.456004, 0.061713, 0.022703]
    solved = solve(drafted, teacher, WIDE)
    np.testing.assert_allclose(np.exp(every_entry(solved, drafted, teacher)[0]), p, atol=1e-6)
    assert solved.tv == pytest.approx(0.315584, abs=1e-6)
    y, z, corrected = events(drafted, teacher)
    assert follows(shares(z, 4), p)
    assert follows(shares(y, 4), [0.3, 0.3, 0.2, 0.2])
    residual = shares(np.asarray(y)[np.asarray(corrected)], 4)
    assert follows(residual, [0, 0, 0.438193, 0.561807], int(corrected.sum()))


def test_s01_logits_kept_in_bf16_are_normalised_in_float32():
    """A softmax in bf16 would sum to 0.998; the draw, the test and the record use none."""
    drafted, teacher = jnp.array([2.015625, 2.0, 0.0, -1.0], jnp.bfloat16), log(0.3, 0.3, 0.2, 0.2)
    p = np.exp(log_softmax(drafted).astype(float))
    solved = solve(drafted, teacher, WIDE)
    np.testing.assert_allclose(np.exp(every_entry(solved, drafted, teacher)[0]), p, atol=1e-6)
    y, z, _ = events(drafted, teacher)
    assert follows(shares(z, 4), p)
    assert follows(shares(y, 4), [0.3, 0.3, 0.2, 0.2])


def test_s02_a_processed_draft_tested_with_the_raw_p_is_seen():
    """Top-2 proposals accepted by the raw p give [0.25, 0.375, 0.375] and not q."""
    p, q, top2 = log(0.5, 0.3, 0.2), log(0.2, 0.3, 0.5), log(0.625, 0.375, 0)
    y, _, _ = events(p, q)
    assert follows(shares(y, 3), [0.2, 0.3, 0.5])
    accept = reference.acceptance(p.astype(float), q.astype(float))
    kept = np.exp(top2.astype(float)) * accept
    wrong = kept + (1 - kept.sum()) * reference.residual(p.astype(float), q.astype(float))
    np.testing.assert_allclose(wrong, [0.25, 0.375, 0.375], atol=1e-6)
    assert not follows(shares(y, 3), wrong)


def test_s03_shared_randomness_is_seen():
    p, q = log(0.5, 0.2, 0.2, 0.1), log(0.2, 0.35, 0.1, 0.35)
    law = [0.2, 0.35, 0.1, 0.35]
    assert follows(shares(events(p, q)[0], 4), law)
    draft, accept = int(Purpose.DRAFT), int(Purpose.ACCEPT)
    again = shares(events(p, q, purposes=(draft, accept, draft))[0], 4)
    assert not follows(again, law)
    np.testing.assert_allclose(again, [0.2, 0.322, 0.1, 0.378], atol=0.005)


def test_s04_the_correction_is_drawn_from_the_residual():
    p, t = log(0.7, 0.2, 0.1), log(0.1, 0.3, 0.6)
    y, _, corrected = events(p, t, 0.02)
    share = shares(y, 3)
    assert follows(share, [0.610195, 0.242508, 0.147297])
    for wrong in ([0.66499, 0.22178, 0.11323], [0.61918, 0.22694, 0.15388]):  # from q, from T
        assert not follows(share, wrong)
    drawn = shares(np.asarray(y)[np.asarray(corrected)], 3)
    assert follows(drawn, [0, 0.473332, 0.526668], int(corrected.sum()))


@pytest.mark.parametrize("p", [(0.25, 0.25, 0.5), (0.0, 1.0, 0.0)])
def test_s05_equal_models_correct_nothing(p):
    y, z, corrected = events(log(*p), log(*p), 0.02)
    assert not corrected.any()
    np.testing.assert_array_equal(y, z)
    assert follows(shares(y, 3), p)


def test_s06_acceptance_is_not_equality_with_a_sample():
    y, _, corrected = events(log(0.6, 0.3, 0.1), log(0.3, 0.3, 0.4))
    rate = float(corrected.mean())
    assert abs(rate - 0.3) < 5 * np.sqrt(0.3 * 0.7 / DRAWS)  # equality would reject 0.69
    assert set(np.asarray(y)[np.asarray(corrected)].tolist()) == {2}
    assert follows(shares(y, 3), [0.3, 0.3, 0.4])


def test_s07_a_uniform_of_zero_does_not_accept_what_q_excludes():
    p, q = log(0.5, 0.3, 0.2), log(0, 0.4, 0.6)
    y, z, corrected = events(p, q, smallest_uniform=True)
    np.testing.assert_array_equal(corrected, np.asarray(z) == 0)
    assert 0 not in set(np.asarray(y).tolist())
    y, _, corrected = events(p, q)
    assert abs(float(corrected.mean()) - 0.5) < 5 * np.sqrt(0.25 / DRAWS)
    drawn = shares(np.asarray(y)[np.asarray(corrected)], 3)
    assert follows(drawn, [0, 0.2, 0.8], int(corrected.sum()))
