"""The loop outside the engine: the engine's tokens, through another solution of the bridge."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from saki_jax.models.lm import LanguageModel
from saki_jax.rollout import bridge, coupling, external_bridge
from saki_jax.rollout.batch import Rollout
from saki_jax.rollout.engine import make_guided
from saki_jax.rollout.external import make_external
from saki_jax.rollout.keys import step_key
from saki_jax.rollout.spec import RolloutSpec
from toys import blend, lookup_model, prompts_of, random_table

VOCAB = 11
TEACHER = random_table(1, VOCAB, scale=1.5)
STUDENT = blend(TEACHER, random_table(2, VOCAB, scale=1.5), 0.5)
PROMPTS = prompts_of([[3, 1, 4], [5], [9, 2, 6, 5, 3], [0, 7], [1, 8, 2], [2, 2]])


def spec_of(**changes) -> RolloutSpec:
    return RolloutSpec(
        **({"response_length": 24, "end_ids": (0,), "pad_id": 0, "block_size": 4} | changes)
    )


@functools.cache
def pair(**changes):
    """Engine and external loop of one spec, compiled once for all tests."""
    model, spec = lookup_model(VOCAB), spec_of(**changes)
    return make_guided(model, model, spec), make_external(model, model, spec)


def both(epsilon: float, **changes) -> tuple[Rollout, Rollout]:
    arguments = (STUDENT, TEACHER, PROMPTS, epsilon, step_key(0, 1))
    return tuple(rollout(*arguments) for rollout in pair(**changes))


# The two solvers stop within 4e-5 of epsilon, so q differs by about 1e-5 and a token in some 1e5;
# with these seeds none does.
@pytest.mark.parametrize("changes", [{}, {"block_size": 1}, {"slots": 2, "refill_rows": 1}])
@pytest.mark.parametrize("epsilon", [0.0, 0.02, 0.3, 1e4])
def test_tokens_and_events_are_the_engines(epsilon, changes):
    engine, external = both(epsilon, **changes)
    for name in ("tokens", "length", "finished", "nonfinite", "proposal", "corrected"):
        np.testing.assert_array_equal(getattr(external, name), getattr(engine, name), name)
    np.testing.assert_array_equal(external.teacher_mode, engine.teacher_mode)
    for name in ("log_p", "log_t", "log_q", "accept_prob", "kl", "tv", "entropy", "beta"):
        ours, theirs = np.asarray(getattr(external, name)), np.asarray(getattr(engine, name))
        np.testing.assert_allclose(ours, theirs, rtol=3e-4, atol=2e-6, err_msg=name)
        assert ours.dtype == theirs.dtype
    corrected = int(np.sum(external.corrected))
    assert (corrected == 0) if epsilon == 0 else (corrected > 0)
    for name in ("waves", "row_waves", "student_forwards", "teacher_forwards", "committed"):
        assert int(getattr(external.counters, name)) == int(getattr(engine.counters, name)), name


def test_the_token_wise_form_gives_the_same_tokens_with_more_waves():
    _, blocks = both(0.1)
    _, tokenwise = both(0.1, block_size=1)
    np.testing.assert_array_equal(blocks.tokens, tokenwise.tokens)
    assert tokenwise.counters.waves > 2 * blocks.counters.waves


def test_another_teacher_would_be_seen():
    engine, _ = both(0.3)
    _, loop = pair()
    other = loop(STUDENT, STUDENT, PROMPTS, 0.3, step_key(0, 1))
    assert (np.asarray(engine.tokens) != other.tokens).any()


def test_progress_ends_with_all_rows():
    heard = []
    _, loop = pair(slots=2, refill_rows=1)
    rollout = loop(STUDENT, TEACHER, PROMPTS, 0.1, step_key(0, 1), heard.append)
    assert heard[-1].rows_done == heard[-1].rows_total == 6
    assert heard[-1].committed == rollout.length.sum()
    assert heard[-1].corrections == rollout.corrected.sum()
    assert len(heard) == rollout.counters.waves


def test_a_row_with_nan_stops_and_the_others_go_on():
    broken = TEACHER.at[:, 3].set(jnp.where(jnp.arange(len(TEACHER)) % 50 == 0, jnp.nan, 0.0))
    arguments = (STUDENT, broken, PROMPTS, 0.05, step_key(0, 1))
    engine, external = (rollout(*arguments) for rollout in pair())
    assert 0 < external.nonfinite.sum() < 6
    np.testing.assert_array_equal(external.nonfinite, engine.nonfinite)
    np.testing.assert_array_equal(external.length, engine.length)
    np.testing.assert_array_equal(external.tokens, engine.tokens)


def test_what_it_does_not_have_is_refused():
    model = lookup_model(VOCAB)
    with pytest.raises(ValueError, match="solver 'newton' and no teacher sample"):
        make_external(model, model, spec_of(solver="bisect"))
    with pytest.raises(ValueError, match="no teacher sample"):
        make_external(model, model, spec_of(teacher_sample=True))
    small = LanguageModel(7, model.init_cache, model.forward, model.logits)
    with pytest.raises(ValueError, match="11 logits and the teacher 7"):
        make_external(model, small, spec_of())


def logits_pairs(seed: int, rows: int, vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """Gaussian, heavy-tailed, peaked, nearly equal and excluding pairs, in turn."""
    rng = np.random.default_rng(seed)
    a = rng.normal(scale=2.0, size=(rows, vocab))
    b = a + rng.normal(size=(rows, vocab))
    b[1::5] = a[1::5] + rng.standard_t(2, size=a[1::5].shape)
    a[2::5, 7] += 25.0
    b[3::5] = a[3::5] + 1e-3 * rng.normal(size=a[3::5].shape)
    a[4::5, : vocab // 3] = -np.inf
    b[4::5, : vocab // 3] = -np.inf
    return a.astype(np.float32), b.astype(np.float32)


@pytest.mark.parametrize("epsilon", [0.0, 1e-8, 4e-4, 0.02, 1.0])
def test_the_bridge_is_the_largest_feasible_one(epsilon):
    a, b = logits_pairs(0, 50, 3000)
    solved = external_bridge.solve(a, b, epsilon)
    log_p, log_t, log_q, x = external_bridge.terms(solved, a, b)
    p, q = np.exp(log_p), np.exp(log_q)
    np.testing.assert_allclose(q.sum(axis=1), 1.0, atol=1e-9)
    kl = np.where(q > 0, q * x, 0.0).sum(axis=1)
    np.testing.assert_allclose(solved.kl, kl, rtol=1e-6, atol=1e-14)
    np.testing.assert_allclose(solved.tv, np.maximum(q - p, 0).sum(axis=1), rtol=1e-6, atol=1e-12)
    assert (kl <= epsilon * (1 + 1e-9)).all()
    assert ((kl >= epsilon * (1 - 4e-5)) | (solved.beta == 1)).all()
    np.testing.assert_array_equal(log_q[solved.beta == 1], log_t[solved.beta == 1])
    np.testing.assert_array_equal(solved.teacher_mode, b.argmax(axis=1))


@pytest.mark.parametrize("epsilon", [4e-4, 0.02])
def test_the_bridge_is_the_engines(epsilon):
    a, b = logits_pairs(1, 40, 512)
    ours = external_bridge.solve(a, b, epsilon)
    theirs = bridge.solve(jnp.asarray(a), jnp.asarray(b), jnp.float32(epsilon))
    np.testing.assert_allclose(ours.beta, theirs.beta, rtol=1e-4)
    np.testing.assert_allclose(ours.tv, theirs.tv, rtol=1e-4)
    np.testing.assert_allclose(ours.entropy, theirs.entropy, rtol=1e-5, atol=1e-5)


def test_a_teacher_that_excludes_too_much_leaves_the_student():
    a, b = logits_pairs(2, 4, 100)
    a[:, 0], b[:, 0] = 40.0, -np.inf
    solved = external_bridge.solve(a[:3], b[:3], 1e-3)
    np.testing.assert_array_equal(solved.beta, 0.0)
    _, _, _, x = external_bridge.terms(solved, a[:3], b[:3])
    np.testing.assert_array_equal(x, 0.0)
    assert not external_bridge.rejects(np.zeros(100, np.float32), x[0]).any()


def test_a_teacher_alone_on_a_token_is_never_followed_there():
    a, b = logits_pairs(3, 5, 100)
    a[:, 3], b[:, 3] = -np.inf, 1.0
    solved = external_bridge.solve(a, b, 1e4)
    _, _, log_q, _ = external_bridge.terms(solved, a, b)
    assert (solved.beta < 1).all()
    assert (log_q[:, 3] == -np.inf).all()


def test_the_residual_draw_is_the_engines():
    a, b = logits_pairs(4, 30, 200)
    keys = jax.random.split(jax.random.key(0), 30)
    solved = bridge.solve(jnp.asarray(a), jnp.asarray(b), jnp.float32(0.05))
    token, found = coupling.draw_residual(solved, jnp.asarray(a), jnp.asarray(b), keys)
    ours, ours_found = external_bridge.draw_residual(
        external_bridge.solve(a, b, 0.05), a, b, np.asarray(coupling.gumbel(keys, 200))
    )
    np.testing.assert_array_equal(ours, token)
    np.testing.assert_array_equal(ours_found, found)


def test_equal_models_have_no_residual():
    a, _ = logits_pairs(5, 4, 50)
    solved = external_bridge.solve(a, a, 0.01)
    _, found = external_bridge.draw_residual(solved, a, a, np.zeros_like(a))
    np.testing.assert_array_equal(solved.beta, 1.0)
    assert not found.any()
