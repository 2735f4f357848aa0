"""The engine's responses follow the law that the paper's section 3 defines, sequence by sequence.

Full enumeration against 200,000 rows and more. All seeds are fixed; under the right law a fresh
seed would fail with the probability `LEVEL`, and each wrong law named here is rejected far beyond.
"""

from functools import cache

import jax.numpy as jnp
import numpy as np
import pytest

from saki_jax.rollout import bridge, coupling, reference, wave
from saki_jax.rollout.engine import make_guided, make_rollout
from saki_jax.rollout.keys import Purpose, position_keys, step_key, uniform
from saki_jax.rollout.spec import RolloutSpec
from toys import (
    blend,
    chi_square_p_value,
    context_index,
    count_responses,
    lookup_model,
    prompts_of,
    random_table,
)

LEVEL = 1e-4
REJECTED = 1e-12
ROWS = 200_000
V, T, ORDER = 4, 3, 2
END = 0
PROMPT = (2, 1)
EPSILON = 0.08
HUGE = 50.0  # a budget under which q = T

STUDENT = random_table(31, V, ORDER)
TEACHER = blend(STUDENT, random_table(32, V, ORDER), 0.6)


@cache
def law(epsilon: float) -> dict[tuple[int, ...], float]:
    """The bridge's law of responses; epsilon 0 is the student's own, a huge one the teacher's."""

    def model(table):
        return lambda history: np.asarray(table[context_index(history, V, ORDER)])

    return reference.sequence_law(model(STUDENT), model(TEACHER), PROMPT, epsilon, T, (END,))


@cache
def engine(make=make_guided, **changes):
    model = lookup_model(V, ORDER)
    plain = {"response_length": T, "end_ids": (END,), "pad_id": END, "block_size": 2, "compact": 0}
    return make(model, model, RolloutSpec(**plain | changes))


def answers(run, epsilon: float = EPSILON):
    return run(STUDENT, TEACHER, prompts_of([PROMPT] * ROWS), epsilon, step_key(0, 1))


def p_value(result, expected: dict) -> float:
    return chi_square_p_value(*count_responses(result, expected))


def test_the_law_has_every_response_once():
    assert sum(law(EPSILON).values()) == pytest.approx(1, abs=1e-12)
    assert len(law(EPSILON)) == 1 + 3 * 1 + 3 * 3 * 4


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param({}, id="plain"),
        pytest.param(
            {"block_size": 4, "solver": "bisect", "slots": 60_000, "refill_rows": 10_000},
            id="other-schedule-and-solver",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_responses_follow_the_bridge(spec):
    result = answers(engine(**spec))
    assert p_value(result, law(EPSILON)) > LEVEL
    for wrong in (0.0, 1.2 * EPSILON, HUGE):  # the power of the test
        assert p_value(result, law(wrong)) < REJECTED
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


@pytest.mark.slow
def test_at_epsilon_zero_the_responses_follow_the_student():
    result = answers(engine(make_rollout), 0.0)
    assert p_value(result, law(0.0)) > LEVEL
    assert p_value(result, law(EPSILON)) < REJECTED


@pytest.mark.slow
def test_under_a_huge_budget_the_responses_follow_the_teacher():
    assert p_value(answers(engine(), HUGE), law(HUGE)) > LEVEL


def share(purposes: dict[Purpose, Purpose]):
    """`position_keys` that gives some purposes the keys of others."""

    def mistaken(key, sequence_id, position, purpose):
        return position_keys(key, sequence_id, position, purposes.get(purpose, purpose))

    return mistaken


def residual_from_a_uniform(solved, logits_p, logits_t, keys):
    """`draw_residual` by the inverse distribution function: right with keys of its own."""
    _, _, log_q, x = bridge.log_ratios(solved, logits_p, logits_t)
    weight = jnp.where(x > 0, jnp.exp(log_q) * -jnp.expm1(-x), 0.0)
    below = jnp.cumsum(weight, axis=-1)
    token = (below <= uniform(keys)[:, None] * below[:, -1:]).sum(axis=-1)
    return token.astype(jnp.int32), weight.sum(axis=-1) > 0


@pytest.mark.slow
def test_a_residual_that_reuses_the_proposals_noise_is_caught(monkeypatch):
    monkeypatch.setattr(wave, "position_keys", share({Purpose.RESIDUAL: Purpose.DRAFT}))
    mistaken = engine.__wrapped__()  # compiled anew, with the mistake in it
    assert p_value(answers(mistaken), law(EPSILON)) < REJECTED


def test_a_residual_that_reuses_the_uniform_of_the_acceptance_is_caught(monkeypatch):
    monkeypatch.setattr(wave, "position_keys", share({Purpose.RESIDUAL: Purpose.ACCEPT}))
    monkeypatch.setattr(coupling, "draw_residual", residual_from_a_uniform)
    mistaken = engine.__wrapped__()
    assert p_value(answers(mistaken), law(EPSILON)) < REJECTED


@pytest.mark.slow
def test_the_same_residual_with_a_uniform_of_its_own_is_right(monkeypatch):
    """So it is the sharing that the test above catches."""
    monkeypatch.setattr(coupling, "draw_residual", residual_from_a_uniform)
    assert p_value(answers(engine.__wrapped__()), law(EPSILON)) > LEVEL
