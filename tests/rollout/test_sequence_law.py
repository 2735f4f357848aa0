"""The engine's responses follow the law that the paper's section 3 defines, sequence by sequence.

Full enumeration against 200,000 rows and more. All seeds are fixed; under the right law a fresh
seed would fail with the probability `LEVEL`, and each wrong law named here is rejected far beyond.
"""

from functools import cache

import jax.numpy as jnp
import numpy as np
import pytest

from saki_jax.rollout import wave
from saki_jax.rollout.engine import make_guided, make_rollout
from saki_jax.rollout.keys import Purpose, step_key
from saki_jax.rollout.spec import RolloutSpec
from toys import (
    blend,
    chi_square_p_value,
    context_index,
    count_responses,
    lookup_model,
    prompts_of,
    random_table,
    scripted_model,
    sequence_law,
)

LEVEL = 1e-4
REJECTED = 1e-12
ROWS = 200_000
V, T, ORDER = 4, 3, 2
END = 0
PROMPT = (2, 1)
EPSILON = 0.08

STUDENT = random_table(31, V, ORDER)
TEACHER = blend(STUDENT, random_table(32, V, ORDER), 0.6)


def softmax(logits) -> np.ndarray:
    logits = np.asarray(logits, np.float64)
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def bridge_law(p: np.ndarray, t: np.ndarray, epsilon: float) -> np.ndarray:
    """q by bisection in float64 (beta = 1 where the teacher is near enough)."""

    def at(beta: float) -> tuple[np.ndarray, float]:
        weights = p ** (1 - beta) * t**beta
        q = weights / weights.sum()
        return q, float((q * np.log(q / p)).sum())

    if at(1.0)[1] <= epsilon:
        return t
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if at(middle)[1] <= epsilon else (low, middle)
    return at(low)[0]


@cache
def law(epsilon: float, which: str = "q") -> dict:
    def next_law(history):
        index = context_index(history, V, ORDER)
        p, t = softmax(STUDENT[index]), softmax(TEACHER[index])
        return {"q": bridge_law(p, t, epsilon), "p": p, "t": t}[which]

    return sequence_law(next_law, PROMPT, T, (END,))


@cache
def engine(make=make_guided, **changes):
    model = lookup_model(V, ORDER)
    plain = {"response_length": T, "end_ids": (END,), "pad_id": END, "block_size": 2}
    return make(model, model, RolloutSpec(**plain | changes))


def answers(run, epsilon: float = EPSILON):
    return run(STUDENT, TEACHER, prompts_of([PROMPT] * ROWS), epsilon, step_key(0, 1))


def p_value(result, expected: dict) -> float:
    return chi_square_p_value(*count_responses(result, expected))


def test_the_laws_are_apart_and_sum_to_one():
    for which in ("q", "p", "t"):
        assert sum(law(EPSILON, which).values()) == pytest.approx(1, abs=1e-12)
    assert len(law(EPSILON)) == 1 + 3 * 1 + 3 * 3 * 4


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"block_size": 4, "solver": "bisect"},
        {"slots": 60_000, "refill_rows": 10_000},
    ],
    ids=["K2", "K4-bisect", "refill"],
)
def test_the_responses_follow_the_bridge(spec):
    result = answers(engine(**spec))
    assert p_value(result, law(EPSILON)) > LEVEL
    if not spec:  # the power of the test
        assert p_value(result, law(EPSILON, "p")) < REJECTED
        assert p_value(result, law(EPSILON, "t")) < REJECTED
        assert p_value(result, law(EPSILON * 1.2)) < REJECTED
        corrections_come_as_often_as_the_total_variation_says(result)


def corrections_come_as_often_as_the_total_variation_says(result) -> None:
    """Within 5 sigma (failure probability 6e-7), and below the Pinsker bound."""
    valid = np.asarray(result.valid)
    tv, corrected = np.asarray(result.tv)[valid], np.asarray(result.corrected)[valid]
    sigma = np.sqrt((tv * (1 - tv)).sum())
    assert abs(corrected.sum() - tv.sum()) < 5 * sigma
    assert tv.max() <= np.sqrt(EPSILON / 2)
    assert corrected.mean() < np.sqrt(EPSILON / 2)
    assert 0.03 * tv.sum() > 5 * sigma  # the power: a rate 3 % off would be seen


def test_at_epsilon_zero_the_responses_follow_the_student():
    result = answers(engine(make_rollout), 0.0)
    assert p_value(result, law(EPSILON, "p")) > LEVEL
    assert p_value(result, law(EPSILON)) < REJECTED


def test_under_a_wide_budget_the_responses_follow_the_teacher():
    assert p_value(answers(engine(), 50.0), law(EPSILON, "t")) > LEVEL


MISTAKES = {
    "the residual reuses the proposal's noise": (Purpose.RESIDUAL, {"purpose": Purpose.DRAFT}),
    "all positions share an acceptance key": (Purpose.ACCEPT, {"position": 0}),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES.keys())
def test_sharing_a_key_is_caught(monkeypatch, mistake):
    share_keys(monkeypatch, *mistake)
    mistaken = engine.__wrapped__()  # compiled anew, with the mistake in it
    assert p_value(answers(mistaken), law(EPSILON)) < REJECTED


def share_keys(monkeypatch, shared: Purpose, change: dict) -> None:
    """Draws of the purpose ``shared`` get the keys of another purpose or position."""
    honest = wave.position_keys

    def mistaken(key, sequence_id, position, purpose):
        if purpose == shared:
            purpose = change.get("purpose", purpose)
            position = (
                jnp.full_like(position, change["position"]) if "position" in change else position
            )
        return honest(key, sequence_id, position, purpose)

    monkeypatch.setattr(wave, "position_keys", mistaken)


# The numbers of the case, with the tokens in another order.
P = np.array([0.2, 0.1, 0.5, 0.2])
Q = np.array([0.35, 0.35, 0.2, 0.1])


def one_token_frequencies() -> np.ndarray:
    """Frequencies of 200,000 single tokens where the student is P and the budget lets q be Q."""
    model = scripted_model(4)
    spec = RolloutSpec(response_length=1, end_ids=(), pad_id=0, block_size=1)
    p, q = (jnp.log(jnp.asarray(x, jnp.float32))[None] for x in (P, Q))
    result = make_guided(model, model, spec)(p, q, prompts_of([[1]] * ROWS), 10.0, step_key(0, 1))
    return np.bincount(np.asarray(result.tokens[:, 0]), minlength=4) / ROWS


def test_s03_a_single_token_follows_q():
    assert np.abs(one_token_frequencies() - Q).max() < 0.0054  # 5 sigma


def test_s03_shared_gumbel_noise_gives_another_law(monkeypatch):
    share_keys(monkeypatch, Purpose.RESIDUAL, {"purpose": Purpose.DRAFT})
    wrong = one_token_frequencies()
    assert np.abs(wrong - Q).max() > 0.0054
    np.testing.assert_allclose(wrong, [0.322, 0.378, 0.200, 0.100], atol=0.0054)
