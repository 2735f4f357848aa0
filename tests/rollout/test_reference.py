"""The float64 reference against the paper's own numbers and against enumeration."""

import numpy as np
import pytest

from saki_jax.rollout import reference


def log(*p: float) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(np.array(p, np.float64))


def random_pair(rng, vocab: int) -> tuple[np.ndarray, np.ndarray]:
    a = rng.normal(0, 2, vocab)
    return a, a + rng.normal(0, 1, vocab)


def test_s04_beta_q_and_residual():
    bridge = reference.solve_bridge(log(0.7, 0.2, 0.1), log(0.1, 0.3, 0.6), 0.02)
    assert bridge.beta == pytest.approx(0.140351, abs=1e-6)
    np.testing.assert_allclose(np.exp(bridge.log_q), [0.610195, 0.242508, 0.147297], atol=1e-6)
    log_p, log_q = bridge.log_p, bridge.log_q
    assert reference.total_variation(log_p, log_q) == pytest.approx(0.0898050, abs=1e-7)
    np.testing.assert_allclose(reference.acceptance(log_p, log_q), [0.871707, 1, 1], atol=1e-6)
    np.testing.assert_allclose(reference.residual(log_p, log_q), [0, 0.473332, 0.526668], atol=1e-6)


def test_s21_the_edges_of_the_bridge():
    excluded = reference.solve_bridge(log(0.6, 0.3, 0.1), log(0, 0.5, 0.5), 0.02)
    assert excluded.beta == 0
    np.testing.assert_array_equal(excluded.log_q, excluded.log_p)
    near = reference.solve_bridge(log(0.5, 0.3, 0.2), log(0.45, 0.33, 0.22), 0.02)
    assert near.beta == 1
    assert reference.kl_divergence(near.log_t, near.log_p) == pytest.approx(0.0050084, abs=1e-7)
    assert reference.total_variation(near.log_p, near.log_q) == pytest.approx(0.05)
    equal = reference.solve_bridge(log(0.5, 0.3, 0.2), log(0.5, 0.3, 0.2), 0.02)
    assert equal.beta == 1
    assert reference.solve_bridge(log(0.5, 0.5), log(0.4, 0.6), 0.0).beta == 0
    # Only the student excludes: T restricted to p's support, for every beta below 1.
    lost = reference.solve_bridge(log(0, 0.5, 0.5), log(0.5, 0.25, 0.25), 0.02)
    assert 1 - 1e-15 < lost.beta < 1
    np.testing.assert_allclose(np.exp(lost.log_q), [0, 0.5, 0.5])


def test_beta_is_the_largest_feasible_one():
    rng = np.random.default_rng(0)
    for _ in range(50):
        a, b = random_pair(rng, 30)
        for epsilon in (1e-8, 4e-4, 0.02):
            bridge = reference.solve_bridge(a, b, epsilon)
            assert reference.kl_divergence(bridge.log_q, bridge.log_p) <= epsilon
            beyond = reference.interpolate(bridge.log_p, bridge.log_t, bridge.beta * (1 + 1e-6))
            if bridge.beta < 1:
                assert reference.kl_divergence(beyond, bridge.log_p) > epsilon


def test_the_one_step_law_is_q():
    """Summed over all proposals, for ordinary rows and for rows with zeros."""
    rng = np.random.default_rng(1)
    for epsilon in (0.0, 1e-6, 0.02, 0.5, 50.0):
        for hole in (None, "p", "t"):
            a, b = random_pair(rng, 40)
            if hole:
                (a if hole == "p" else b)[5] = -np.inf
            bridge = reference.solve_bridge(a, b, epsilon)
            law = reference.one_step_law(bridge.log_p, bridge.log_q)
            np.testing.assert_allclose(law, np.exp(bridge.log_q), atol=1e-14)


def test_s05_no_correction_where_p_equals_q():
    for p in ([0.25, 0.25, 0.5], [0, 1.0, 0]):
        equal = log(*p)
        np.testing.assert_array_equal(reference.residual(equal, equal), np.zeros(3))
        np.testing.assert_allclose(reference.one_step_law(equal, equal), p)


def model(seed: int):
    """A student or teacher over 3 tokens that depends on the whole history."""

    def logits(history: tuple[int, ...]) -> np.ndarray:
        return np.random.default_rng([seed, *history]).normal(0, 1, 3)

    return logits


def test_the_sequence_law_is_a_law_and_generation_follows_it():
    """Chi-square over all responses of two tokens; 5 sigma."""
    student, teacher = model(1), model(2)
    law = reference.sequence_law(student, teacher, (0,), 0.1, 2, end_ids={2})
    assert sum(law.values()) == pytest.approx(1, abs=1e-12)
    assert set(law) == {(2,)} | {(a, b) for a in (0, 1) for b in range(3)}

    rng, draws = np.random.default_rng(0), 500
    counts = dict.fromkeys(law, 0)
    corrections = 0
    for _ in range(draws):
        events = reference.generate(student, teacher, (0,), 0.1, 2, rng, end_ids={2})
        counts[tuple(event.token for event in events)] += 1
        corrections += sum(event.corrected for event in events)
        assert all(event.token == event.proposal or event.corrected for event in events)
    expected = np.array([draws * law[r] for r in law])
    statistic = ((np.array([counts[r] for r in law]) - expected) ** 2 / expected).sum()
    freedom = len(law) - 1
    assert abs(statistic - freedom) < 5 * np.sqrt(2 * freedom)
    assert corrections > 0
