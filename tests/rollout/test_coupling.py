"""The acceptance test, the draws and the residual, each against its law."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import poisson

from bridge_corpus import log_softmax, pair, solve, token_terms, true_log_q
from saki_jax.rollout import coupling
from saki_jax.rollout.keys import Purpose, position_keys, step_key


def keys(rows: int, purpose: Purpose = Purpose.DRAFT, step: int = 1) -> jax.Array:
    ids = jnp.arange(rows, dtype=jnp.int32)
    return position_keys(step_key(0, step), ids, jnp.zeros_like(ids), purpose)


draw_residual = jax.jit(coupling.draw_residual)


def test_s07_a_token_without_q_is_rejected_by_every_uniform():
    largest = 1 - 2.0**-24
    v = jnp.array([0.0, 0.5, largest])
    assert coupling.rejects(v, jnp.full(3, -jnp.inf)).all()
    # q/p so small that rho rounds to 1: rejected even by the largest uniform.
    assert coupling.rejects(v, jnp.full(3, -30.0)).all()


def test_a_token_with_q_at_least_p_is_kept_by_every_uniform():
    v = jnp.array([0.0, 0.0, 0.0, 1 - 2.0**-24])
    assert not coupling.rejects(v, jnp.array([0.0, 1e-7, 50.0, jnp.inf])).any()


def test_the_acceptance_is_strict_and_complementary():
    """u < q/p with u = 1 - v, u in (0, 1]: rejected iff v < 1 - q/p."""
    x = jnp.log(jnp.array([0.75, 0.75, 0.75]))
    rho = -jnp.expm1(x)
    v = jnp.array([rho[0] - 2.0**-24, rho[1], rho[2] + 2.0**-24])
    assert coupling.rejects(v, x).tolist() == [True, False, False]
    np.testing.assert_allclose(coupling.accept_probability(x), 0.75, rtol=1e-6)
    assert coupling.accept_probability(jnp.array([-jnp.inf, 0.0, 3.0])).tolist() == [0, 1, 1]


def test_small_differences_keep_their_digits():
    """rho = 1e-6 is the rate of rejections, not a rounding of 1 - 0.999999."""
    x = jnp.float32(-1e-6)
    step = jnp.arange(100, dtype=jnp.float32) * 2.0**-24
    assert int(coupling.rejects(step, jnp.full(100, x)).sum()) == 17  # ceil(1e-6 * 2^24)


def test_s16_nan_rejects_nothing():
    v = jnp.array([0.0, 0.5, 1 - 2.0**-24])
    assert not coupling.rejects(v, jnp.full(3, jnp.nan)).any()


@pytest.mark.parametrize("content", [np.nan, -np.inf, 0.0, np.inf])
def test_s16_draws_from_any_content_stay_inside_the_vocabulary(content):
    token = coupling.draw(jnp.full((5, 7), content), keys(5))
    assert ((token >= 0) & (token < 7)).all()


def test_a_token_of_probability_zero_is_never_drawn():
    logits = jnp.tile(jnp.array([-jnp.inf, 0.0, -jnp.inf, -1.0, -jnp.inf]), (50_000, 1))
    assert set(np.asarray(coupling.draw(logits, keys(50_000))).tolist()) == {1, 3}


def test_draws_are_stable_under_rounding_of_the_logits():
    """Noise of 1e-5 in the logits changes a token only at near ties: at most 1 of 2,000 here."""
    rng = np.random.default_rng(0)
    a = pair("zipf", 2000, 512, "float32")[0]
    b = a + rng.normal(0, 1e-5, a.shape).astype(np.float32)
    one, other = (np.asarray(coupling.draw(jnp.asarray(x), keys(2000))) for x in (a, b))
    assert (one != other).sum() <= 1
    assert (one != np.asarray(coupling.draw(jnp.asarray(a), keys(2000, step=2)))).sum() > 500


def test_s05_nothing_is_corrected_where_both_models_agree():
    """100,000 draws each: equal rows, equal up to an offset, one-hot."""
    rows = np.array([[0.25, 0.25, 0.5], [0.25, 0.25, 0.5], [0, 1, 0]])
    with np.errstate(divide="ignore"):
        p = np.log(rows).astype(np.float32)
    t = p + np.array([[0.0], [8.0], [0.0]], np.float32)
    solved = solve(p, t)
    a, b = jnp.asarray(p), jnp.asarray(t)
    for token in range(3):
        x = token_terms(solved, a, b, jnp.full(3, token))[3]
        assert not coupling.rejects(jnp.zeros(3), x).any()  # the smallest uniform of all
    assert not np.any(solved.tv)
    _, found = draw_residual(solved, a, b, keys(3, Purpose.RESIDUAL))
    assert not found.any()


def test_s05_a_rejection_without_residual_mass_finds_nothing():
    """Rounding left q/p = 0.9999999 at one token and nothing above p: the proposal has to stay."""
    a = jnp.zeros((3, 3))
    solved = solve(a, a)
    solved = solved._replace(log_norm=solved.log_norm + 1e-7)  # x = -1e-7 everywhere
    x = token_terms(solved, a, a, jnp.array([2, 0, 1]))[3]
    assert coupling.rejects(jnp.zeros(3), x).all()
    token, found = draw_residual(solved, a, a, keys(3, Purpose.RESIDUAL))
    assert not found.any()
    assert ((token >= 0) & (token < 3)).all()


@pytest.mark.parametrize("epsilon", [1e-6, 0.02, 1e4])
def test_residual_draws_follow_the_positive_part_of_q_minus_p(epsilon):
    """100,000 draws against extended precision; every token within 5 sigma (8 tokens)."""
    a, b = pair("near_1e-1" if epsilon < 1e-3 else "zipf", 1, 8, "float32", seed=3)
    solved = solve(a, b, epsilon)
    log_p = log_softmax(a)
    log_q = true_log_q(log_p, log_softmax(b), np.asarray(solved.beta))
    excess = np.maximum(np.exp(log_q) - np.exp(log_p), 0)[0].astype(float)
    law = excess / excess.sum()
    draws = 100_000
    rows = jax.tree.map(lambda x: jnp.broadcast_to(x, (draws, *x.shape[1:])), solved)
    p, t = (jnp.broadcast_to(jnp.asarray(x), (draws, 8)) for x in (a, b))
    token, found = draw_residual(rows, p, t, keys(draws, Purpose.RESIDUAL))
    assert found.all()
    share = np.bincount(np.asarray(token), minlength=8) / draws
    assert (np.abs(share - law) <= 5 * np.sqrt(law * (1 - law) / draws)).all()
    q = np.exp(log_q)[0].astype(float)  # the power: q itself is another law
    assert (np.abs(share - q) > 5 * np.sqrt(q * (1 - q) / draws)).any()


TAIL = 151_935
DRAWS = 4_000


@pytest.fixture(scope="module")
def tail_hits() -> tuple[int, int]:
    """Hits in a tail of 5e-8 each over the real vocabulary: proposals, residual draws.

    For proposals p itself has the tail; for residuals p is one-hot to 1e-12 or less on a token and
    q - p is positive on the tail and on one common token, in the same proportions.
    """
    p = np.full((1, TAIL + 1), np.log(5e-8), np.float32)
    p[0, 7] = np.log1p(-5e-8 * TAIL)
    # The student hardly knows any of these tokens, so that [q - p]+ = T but for its own token.
    student = np.full_like(p, -60.0)
    student[0, 0] = 0.0
    solved = solve(student, p, 1e4)
    chunk = 20

    @jax.jit
    def hits(start):
        ids = start + jnp.arange(chunk, dtype=jnp.int32)
        at = jnp.zeros_like(ids)
        wide = jnp.broadcast_to(jnp.asarray(p), (chunk, TAIL + 1))
        proposal = coupling.draw(wide, position_keys(step_key(0, 1), ids, at, Purpose.DRAFT))
        row = jax.tree.map(lambda x: jnp.broadcast_to(x, (chunk, *x.shape[1:])), solved)
        narrow = jnp.broadcast_to(jnp.asarray(student), wide.shape)
        key = position_keys(step_key(0, 1), ids, at, Purpose.RESIDUAL)
        residual, found = coupling.draw_residual(row, narrow, wide, key)
        return (proposal != 7).sum(), ((residual != 7) & found).sum(), found.all()

    proposals = residuals = 0
    for start in range(0, DRAWS, chunk):
        one, other, found = hits(start)
        assert found
        proposals, residuals = proposals + int(one), residuals + int(other)
    return proposals, residuals


@pytest.mark.parametrize("which", [0, 1], ids=["proposals", "residuals"])
def test_s18_a_thin_tail_is_drawn_as_often_as_is_its_due(tail_hits, which):
    """Poisson with mean 30: between its quantiles at 1e-5 and 1 - 1e-5.

    JAX's default Gumbel ends at 15.94, so that a token at log 5e-8 = -16.8 can only win when the
    common token's noise is below -0.87: 0.7 per mille of the proposals instead of 7.6.
    """
    expected = DRAWS * 5e-8 * TAIL
    least, most = poisson.ppf([1e-5, 1 - 1e-5], expected)
    assert least <= tail_hits[which] <= most
    reach = np.exp(-np.exp(-(15.94 + np.log(5e-8))))
    assert poisson.sf(least - 1, expected * reach) < 1e-3  # the power
