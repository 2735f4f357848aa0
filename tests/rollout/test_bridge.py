"""What the bridge owes in every single case; its accuracy is in test_bridge_corpus.py."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bridge_corpus import (
    every_entry,
    largest_beta,
    log_softmax,
    pair,
    solve,
    token_terms,
    true_kl,
    true_log_q,
)
from saki_jax.rollout import bridge, coupling, reference
from saki_jax.rollout.keys import Purpose, position_keys, step_key, uniform

SOLVERS = ("newton", "bisect")


def logits(*rows) -> np.ndarray:
    """Float32 logits [rows, V] with the given probabilities; 0 becomes -inf."""
    with np.errstate(divide="ignore"):
        return np.log(np.array(rows, np.float64)).astype(np.float32)


@pytest.mark.parametrize("solver", SOLVERS)
def test_s04_beta_and_q_of_a_worked_example(solver):
    p, t = logits(*[[0.7, 0.2, 0.1]] * 6), logits(*[[0.1, 0.3, 0.6]] * 6)
    solved = solve(p, t, solver=solver)
    assert solved.beta[0] == pytest.approx(0.140351, abs=2e-5)
    assert solved.tv[0] == pytest.approx(0.0898050, abs=2e-5)
    log_q = every_entry(solved, p, t)[2]
    np.testing.assert_allclose(np.exp(log_q[0]), [0.610195, 0.242508, 0.147297], atol=2e-5)


@pytest.mark.parametrize("solver", SOLVERS)
def test_s21_edges(solver):
    rows = [
        ([0.6, 0.3, 0.1], [0, 0.5, 0.5]),  # T excludes more than epsilon allows
        ([0.5, 0.3, 0.2], [0.45, 0.33, 0.22]),  # KL(T||p) < epsilon
        ([0.5, 0.3, 0.2], [0.5, 0.3, 0.2]),  # T = p
        ([1, 0, 0], [1, 0, 0]),  # one-hot, equal
        ([0, 1, 0], [0.5, 0.5, 0]),  # p excludes what T wants, nothing else to move
        ([0.999, 0.001, 0], [0.9985, 0, 0.0015]),  # T excludes little, p excludes some of T
    ]
    p, t = (logits(*side) for side in zip(*rows, strict=True))
    solved = solve(p, t, solver=solver)
    log_p, log_t, log_q, x = every_entry(solved, p, t)
    assert not np.isnan(np.stack([log_p, log_t, log_q, x])).any()
    assert np.asarray(solved.beta)[:5].tolist() == [0, 1, 1, 1, 1 - 2.0**-24]
    np.testing.assert_array_equal(log_q[0], log_p[0])
    np.testing.assert_array_equal(x[0], np.zeros(3))
    np.testing.assert_array_equal(log_q[1], log_t[1])
    assert solved.tv[1] == pytest.approx(0.05, abs=1e-6)
    np.testing.assert_allclose(np.exp(np.minimum(x[1], 0)), [0.9, 1, 1], atol=1e-6)
    for equal in (2, 3, 4):
        assert solved.tv[equal] == 0
        np.testing.assert_array_equal(x[equal], np.zeros(3))
    # The last row: whatever beta > 0, q is one-hot at the KL of the mass that T excludes.
    assert solved.beta[5] > 0
    np.testing.assert_allclose(np.exp(log_q[5]), [1, 0, 0], atol=1e-6)
    assert solved.kl[5] == pytest.approx(-np.log(0.999), rel=1e-4)


@pytest.mark.parametrize("solver", SOLVERS)
def test_epsilon_zero_leaves_p_bit_for_bit(solver):
    a, b = pair("zipf", 6, 100, "float32")
    solved = solve(a, b, 0.0, solver)
    log_p, _, log_q, x = every_entry(solved, a, b)
    np.testing.assert_array_equal(log_q, log_p)
    assert not np.any(x)
    assert not np.any([solved.beta, solved.kl, solved.tv, solved.passes])
    assert not coupling.rejects(jnp.zeros(x.shape), jnp.asarray(x)).any()


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_wide_budget_gives_t_bit_for_bit(solver):
    a, b = pair("zipf", 6, 100, "float32")
    solved = solve(a, b, 1e4, solver)
    _, log_t, log_q, _ = every_entry(solved, a, b)
    assert (solved.beta == 1).all()
    np.testing.assert_array_equal(log_q, log_t)


def test_zeros_of_p_stay_and_zeros_of_t_are_taken():
    a, b = (x.copy() for x in pair("near_1e-1", 6, 100, "float32"))
    a[:, 3], b[:, 7] = -np.inf, -np.inf
    a[:, 11] = b[:, 11] = -np.inf
    b[:, 7][:3] = -60  # p's mass there is small enough either way
    a[:, 7] = -60
    for epsilon in (1e-4, 1e4):
        solved = solve(a, b, epsilon)
        assert (solved.beta > 0).all()
        _, _, log_q, x = every_entry(solved, a, b)
        assert (log_q[:, [3, 11]] == -np.inf).all()
        assert (log_q[3:, 7] == -np.inf).all()
        assert (x[3:, 7] == -np.inf).all()
        np.testing.assert_allclose(np.exp(log_q.astype(np.float64)).sum(-1), 1, atol=1e-5)


def test_s17_a_broken_row_is_flagged_and_alone():
    a, b = (np.repeat(x, 6, 0) for x in pair("zipf", 1, 100, "float32"))
    clean = solve(a, b)
    b[1, 40] = np.nan
    a[2, 40] = np.nan
    a[3, 40] = np.inf
    b[4, :] = -np.inf
    a[5, :] = -np.inf
    for solver in SOLVERS:
        solved = solve(a, b, solver=solver)
        assert np.asarray(solved.nonfinite).tolist() == [False] + [True] * 5
        for name in ("beta", "kl", "tv", "entropy"):
            value = np.asarray(getattr(solved, name))
            assert not np.any(value[1:])
            if solver == "newton":
                assert value[0] == np.asarray(getattr(clean, name))[0]
        ids = jnp.full((6,), 40)
        terms = token_terms(solved, a, b, ids)
        assert not np.any(np.stack(terms)[:, 1:])  # no NaN, and x = 0: never rejected
    key = position_keys(step_key(0, 1), ids, ids, Purpose.RESIDUAL)
    _, found = coupling.draw_residual(solved, jnp.asarray(a), jnp.asarray(b), key)
    assert not np.asarray(found)[1:].any()


def test_s16_placeholder_ids_are_harmless():
    a, b = pair("zipf", 6, 100, "float32")
    solved = solve(a, b)
    ids = jnp.array([-1, 100, 2**31 - 1, -(2**31), 0, 99])
    terms = token_terms(solved, a, b, ids)
    assert np.isfinite(np.stack(terms)).all()
    # -1 reads the first entry, not the last by wrapping round.
    log_p = every_entry(solved, a, b)[0]
    assert terms[0][0] == log_p[0, 0]


def test_token_terms_and_entropy_against_extended_precision():
    a, b = pair("dirichlet", 6, 100, "float32")
    solved = solve(a, b)
    ids = np.random.default_rng(0).integers(100, size=6)
    log_p, log_t = log_softmax(a), log_softmax(b)
    log_q = true_log_q(log_p, log_t, np.asarray(solved.beta))
    expected = [np.take_along_axis(v, ids[:, None], -1)[:, 0] for v in (log_p, log_t, log_q)]
    terms = token_terms(solved, a, b, ids)
    for got, want in zip(terms, [*expected, expected[2] - expected[0]], strict=True):
        np.testing.assert_allclose(np.asarray(got), want.astype(float), rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(solved.entropy, -(np.exp(log_p) * log_p).sum(-1), rtol=1e-5)


def test_j10_the_teacher_mode_is_the_lowest_of_equals_across_tiles():
    p, t = np.zeros((2, 6, 100), np.float32)
    t[0, [9, 41]] = t[1, [8, 63]] = t[2, [98, 99]] = 2
    for tile in (0, 24):
        assert np.asarray(solve(p, t, tile=tile).teacher_mode).tolist() == [9, 8, 98, 0, 0, 0]


def test_any_leading_axes():
    a, b = pair("zipf", 6, 100, "float32")
    flat = solve(a, b)
    shaped = solve(a.reshape(2, 3, -1), b.reshape(2, 3, -1))
    np.testing.assert_array_equal(shaped.beta.reshape(-1), flat.beta)
    assert shaped.kl.shape == shaped.entropy.shape == (2, 3)
    row = solve(a[0], b[0])
    assert row.beta.shape == ()
    assert row.beta == pytest.approx(float(flat.beta[0]), rel=1e-5)


def test_j14_rows_in_chunks_and_the_vocabulary_in_tiles_change_nothing():
    """Chunks of 1, 7 and all rows, each with other tiles: with a rest, without, none at all."""
    a, b = (jnp.asarray(x) for x in pair("dirichlet", 21, 3000, "float32"))
    key = position_keys(step_key(0, 1), jnp.arange(21), jnp.arange(21), Purpose.RESIDUAL)

    @partial(jax.jit, static_argnames="tile")
    def event(a, b, key, tile):
        solved = bridge.solve(a, b, jnp.float32(0.02), tile=tile)
        token, found = coupling.draw_residual(solved, a, b, key)
        x = bridge.token_terms(solved, a, b, coupling.draw(a, key))[3]
        rejected = coupling.rejects(uniform(key), x)
        return solved.beta, solved.tv, x, token, found, rejected, solved.teacher_mode

    def outcome(chunk, tile):
        rows = [slice(i, i + chunk) for i in range(0, 21, chunk)]
        parts = [event(a[r], b[r], key[r], tile) for r in rows]
        return [np.concatenate(column) for column in zip(*parts, strict=True)]

    whole = outcome(21, 3000)
    for chunk, tile in ((1, 1000), (7, 1024)):
        got = outcome(chunk, tile)
        np.testing.assert_allclose(got[:3], whole[:3], rtol=2e-5, atol=1e-6)
        for choice, expected in zip(got[3:], whole[3:], strict=True):
            np.testing.assert_array_equal(choice, expected)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_j14_memory_is_a_few_tiles_beside_the_logits(dtype):
    """At the real vocabulary, by the compiler's account: far below one float32 copy of the logits.

    bf16 is counted with the copy of both arrays (as 16-bit integers) that XLA makes on CPU.
    """
    shape = (4, 8, 151_936)
    array = jax.ShapeDtypeStruct(shape, dtype)
    epsilon = jax.ShapeDtypeStruct((), jnp.float32)
    compiled = jax.jit(bridge.solve).lower(array, array, epsilon).compile()
    temporary = compiled.memory_analysis().temp_size_in_bytes
    tile = 32 * 4096 * 4
    copies = 2 * 2 * np.prod(shape) if dtype == jnp.bfloat16 else 0
    assert temporary < 12 * tile + copies < 2 * 4 * np.prod(shape)


@pytest.mark.parametrize("solver", SOLVERS)
def test_s22_ten_thousand_pairs_keep_the_bound(solver):
    """KL and TV under their bounds, beta at most 3e-5 below and 1e-5 above the optimum."""
    rng = np.random.default_rng(22)
    a = rng.normal(0, 2, (10_000, 50)).astype(np.float32)
    b = (a + rng.normal(0, 1, a.shape)).astype(np.float32)
    solved = solve(a, b, 0.02, solver)
    log_p, log_t = log_softmax(a), log_softmax(b)
    beta = np.asarray(solved.beta, np.float64)
    assert true_kl(log_p, log_t, beta).max() <= 0.02 * (1 + 1e-5)
    assert np.asarray(solved.tv).max() <= 0.1
    best = largest_beta(log_p[:2000], log_t[:2000], float(np.float32(0.02)))
    slack = (best - beta[:2000]).astype(float)
    assert slack.max() < 3e-5
    assert slack.min() > -1e-5
    reverse = true_kl(log_t, log_p, 1 - beta)  # the divergence taken the wrong way
    assert np.abs(reverse - 0.02).max() > 1e-3


def test_s22_corrections_come_as_often_as_the_total_variation_says():
    """1e6 draws; within 5 sigma (failure probability 6e-7), and a rate 2 % off would be seen."""
    rng = np.random.default_rng(23)
    a = jnp.asarray(rng.normal(0, 2, (10_000, 50)), jnp.float32)
    b = a + jnp.asarray(rng.normal(0, 1, a.shape), jnp.float32)
    solved = solve(a, b)

    @jax.jit
    def rejections(sample):
        row, at = jnp.arange(10_000), jnp.full(10_000, sample)
        key = step_key(0, 1)
        z = coupling.draw(a, position_keys(key, row, at, Purpose.DRAFT))
        x = bridge.token_terms(solved, a, b, z)[3]
        return coupling.rejects(uniform(position_keys(key, row, at, Purpose.ACCEPT)), x).sum()

    count = sum(int(rejections(sample)) for sample in range(100))
    tv = np.asarray(solved.tv, np.float64)
    expected, sigma = 100 * tv.sum(), np.sqrt(100 * (tv * (1 - tv)).sum())
    assert abs(count - expected) < 5 * sigma
    assert 0.02 * expected > 5 * sigma
    assert count / 1e6 < np.sqrt(0.02 / 2)


def test_bisection_is_sixteen_halvings():
    a, b = pair("zipf", 6, 100, "float32")
    solved = solve(a, b, 0.02, "bisect")
    scaled = np.asarray(solved.beta, np.float64) * 2**16
    np.testing.assert_array_equal(scaled, np.floor(scaled))
    for row in range(6):
        exact = reference.solve_bridge(a[row], b[row], float(np.float32(0.02))).beta
        assert 0 <= exact - float(solved.beta[row]) < 2**-15
    assert (solved.passes == 17).all()


def test_errors_say_what_was_given():
    a = jnp.zeros((2, 5))
    with pytest.raises(ValueError, match="one vocabulary"):
        bridge.solve(a, a[:, :4], jnp.float32(0.02))
    with pytest.raises(ValueError, match="newton, bisect"):
        bridge.solve(a, a, jnp.float32(0.02), solver="brent")
