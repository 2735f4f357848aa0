"""Rollout and update together, on tiny real networks."""

import functools
import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from saki_jax.models import hf
from saki_jax.models.token_logprobs import token_logprobs
from saki_jax.rollout.keys import step_key
from saki_jax.rollout.packing import join
from saki_jax.train import setup
from saki_jax.train.baselines import METHODS
from saki_jax.train.config import ConfigError
from saki_jax.train.objective import Objective
from saki_jax.train.state import init_state
from saki_jax.train.update import make_update
from train_runs import small_config

EPSILON = 0.02
SGD = optax.sgd(1.0)


@pytest.fixture(scope="module")
def config(checkpoints):
    return small_config(checkpoints, eval__source="addition", eval__teacher=False)


@pytest.fixture(scope="module")
def session(config):
    return setup.build(config)


@pytest.fixture(scope="module")
def params(config, session):
    return hf.load(config.student, mesh=session.pair.mesh)[1]


def roll(session, params, epsilon=EPSILON, step=1):
    batch = session.batches.at(step)
    session.batches.set_state(session.batches.get_state() | {"next_step": step})
    rollout = session.rollout(
        params, session.pair.teacher_params, session.next_prompts(), epsilon, step_key(0, step)
    )
    assert rollout.tokens.shape[0] == 2 * len(batch.length)
    return session.lay_out(rollout)


@functools.partial(jax.jit, static_argnums=0)
def fresh_logprobs(model, params, rollout):
    """log-probabilities of the responses by a plain forward over prompt + response."""
    hidden, _ = model.forward(params, join(rollout.prompts, rollout.tokens), None, None)
    at = rollout.prompts.length[:, None] - 1 + jnp.arange(rollout.tokens.shape[1])[None, :]
    hidden = jnp.take_along_axis(hidden, at[:, :, None], axis=1)
    found, _ = token_logprobs(lambda h: model.logits(params, h), hidden, rollout.tokens[..., None])
    return found[..., 0]


def gap(a, b, rollout):
    return float(jnp.where(rollout.valid, jnp.abs(a - b), 0.0).max())


@functools.cache
def sgd_update(student, **options):
    return make_update(student, METHODS["saki"], Objective(), SGD, **options)


def updated(session, params, rollout, **options):
    """(state, stats) after one step of SGD with rate 1."""
    update = sgd_update(session.pair.student, **options)
    return update(init_state(params, SGD), rollout, step_key(0, 1))


@pytest.mark.parametrize("tokens", [1, 50, 10_000])
def test_r02_ratio_is_1_before_the_first_update(session, params, tokens):
    rollout = roll(session, params)
    _, stats = updated(session, params, rollout, tokens_per_micro_batch=tokens)
    assert stats["log_p_gap_max"] <= 1e-4
    assert stats["ratio_clip_rate"] == 0.0
    assert stats["teacher_mode_rate"] > 0
    np.testing.assert_allclose(
        stats["teacher_mode_rate"], rollout.corrected.sum() / rollout.length.sum(), rtol=1e-6
    )


def test_r02_in_bfloat16_the_gap_is_small_and_reported(checkpoints):
    config = small_config(checkpoints, compute_dtype="bfloat16", method="opd")
    session = setup.build(config)
    state = session.initial()
    rollout = roll(session, session.copy(state.params), 0.0)
    _, stats = session.update(state, rollout, step_key(0, 1))
    assert 0 < stats["log_p_gap_mean"] <= 0.02


def test_r03_two_training_forwards_are_equal_to_the_bit(session, params):
    rollout = roll(session, params)
    first = fresh_logprobs(session.pair.student, params, rollout)
    np.testing.assert_array_equal(first, fresh_logprobs(session.pair.student, params, rollout))


def test_r03_dropout_in_the_checkpoint_has_no_effect(checkpoints, tmp_path, session, params):
    folder = shutil.copytree(checkpoints[0], tmp_path / "student")
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"attention_dropout": 0.1}))
    config, loaded = hf.load(folder)
    assert config == session.pair.student_config
    jax.tree.map(np.testing.assert_array_equal, loaded, params)


@pytest.mark.parametrize("epsilon", [EPSILON, 0.0])
def test_r16_teacher_logprobs_are_those_of_a_direct_forward(session, params, epsilon):
    rollout = roll(session, params, epsilon)
    direct = fresh_logprobs(session.pair.teacher, session.pair.teacher_params, rollout)
    assert gap(direct, rollout.log_t, rollout) <= 1e-4


def test_r17_nothing_of_the_old_weights_survives_an_update(session, params):
    teacher = jax.device_get(session.pair.teacher_params)
    state, _ = updated(session, params, roll(session, params))
    new_params = session.copy(state.params)
    new = roll(session, new_params)
    fresh = fresh_logprobs(session.pair.student, new_params, new)
    assert gap(fresh, new.log_p, new) <= 1e-4
    stale = fresh_logprobs(session.pair.student, params, new)
    assert gap(stale, new.log_p, new) > 0.1
    jax.tree.map(np.testing.assert_array_equal, teacher, session.pair.teacher_params)


def test_r21_evaluation_depends_on_weights_and_its_own_seed_only(checkpoints, session, params):
    other = setup.build(
        small_config(
            checkpoints,
            seed=5,
            eval__source="addition",
            epsilon__start=0.5,
            rollout__block_size=2,
        )
    )
    before = roll(session, params)
    first = session.evaluate_student(params)
    second = other.evaluate_student(params)
    assert [r.tokens for r in first.responses] == [r.tokens for r in second.responses]
    assert len(first.responses) == 3 * 2
    assert max(len(r.tokens) for r in first.responses) <= 8
    # It leaves training randomness where it was.
    np.testing.assert_array_equal(before.tokens, roll(session, params).tokens)


def test_j03_a_row_of_padding_only_changes_nothing(session, params):
    rollout = roll(session, params)
    emptied = rollout.replace(length=rollout.length.at[3].set(0))
    others = jnp.array([0, 1, 2, 4, 5, 6, 7])
    without = jax.tree.map(lambda x: x[others] if x.ndim else x, rollout)
    with jax.debug_nans(True):
        state, stats = updated(session, params, emptied)
        expected, without_stats = updated(session, params, without)
    assert stats["num_valid"] == without_stats["num_valid"]
    np.testing.assert_allclose(stats["loss"], without_stats["loss"], atol=1e-6)
    np.testing.assert_allclose(stats["grad_norm"], without_stats["grad_norm"], rtol=1e-5)
    for got, want in zip(
        jax.tree.leaves(state.params), jax.tree.leaves(expected.params), strict=True
    ):
        np.testing.assert_allclose(got, want, atol=1e-6)


def test_j05_one_compilation_each_whatever_epsilon_is(checkpoints, caplog):
    jax.clear_caches()  # equal runs of other tests share the program of generation
    session = setup.build(small_config(checkpoints))
    state = session.initial()
    with jax.log_compiles(True):
        for step, epsilon in enumerate((0.02, 0.013, 0.0, 0.005, 0.0), start=1):
            rollout = roll(session, session.copy(state.params), epsilon, step)
            state, _ = session.update(state, rollout, step_key(0, step))
    traced = re.findall(r"Finished tracing (\w+) for jit", caplog.text)
    assert traced.count("update") == 1
    assert traced.count("advance") == 2  # the guided loop and the student's own
    assert max(map(traced.count, ("terms", "copy"))) == 1


def test_j06_rows_that_do_not_divide_are_refused_at_the_start(checkpoints):
    config = small_config(checkpoints, mesh__data=8, data__prompts_per_step=6)
    with pytest.raises(ConfigError, match=r"12 rows a step .* 8"):
        setup.build(config)


def test_a_mesh_larger_than_the_machine_is_refused(checkpoints):
    with pytest.raises(ConfigError, match=r"needs 16 devices, there are 8"):
        setup.build(small_config(checkpoints, mesh__data=16))
