"""Rewards, group advantages and the loss of grpo."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from saki_jax.data import addition
from saki_jax.evals.grade import Verdict, grade_all
from saki_jax.models import tokenizer as tokenizers
from saki_jax.train.baselines import METHODS, Extras
from saki_jax.train.grpo import group_advantages, rewards
from saki_jax.train.objective import Objective
from saki_jax.train.state import init_state
from saki_jax.train.update import make_update
from train_toys import KEY, bigram, make_rollout

V = 8
LOG_V = float(np.log(V))


def in_float64(rewards, samples):
    groups = np.asarray(rewards, np.float64).reshape(-1, samples)
    centred = groups - groups.mean(1, keepdims=True)
    return (centred / (groups.std(1, keepdims=True, ddof=1) + 1e-6)).reshape(-1)


def test_golden_advantages():
    earned = [1, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 0, 1, 0, 1, 1]
    found = group_advantages(jnp.array(earned, jnp.float32), 8)
    np.testing.assert_allclose(found, in_float64(earned, 8), rtol=1e-5)
    # One right of eight: (7/8) / sqrt(1/8), with n - 1 and not n below the root.
    np.testing.assert_allclose(found[0], 0.875 / np.sqrt(0.125), rtol=1e-5)


@pytest.mark.parametrize("samples", [2, 3, 7, 8, 49])
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1])
def test_equal_rewards_have_advantage_exactly_0(samples, reward):
    found = group_advantages(jnp.full(2 * samples, reward), samples)
    assert not found.any()


def test_groups_do_not_look_at_each_other():
    one = group_advantages(jnp.array([1.0, 0.0, 0.0, 0.0]), 2)
    other = group_advantages(jnp.array([1.0, 0.0, 1.0, 0.0]), 2)
    np.testing.assert_array_equal(one[:2], other[:2])
    np.testing.assert_allclose(one, [0.5**0.5, -(0.5**0.5), 0, 0], rtol=1e-5)


def test_one_sample_is_refused():
    with pytest.raises(ValueError, match=r"1 sample a prompt; .* at least 2"):
        group_advantages(jnp.ones(4), 1)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    addition.save_tokenizer(folder)
    return tokenizers.load(folder)


def test_rewards_are_the_graders_word_on_the_decoded_responses(tokenizer):
    problems = [addition.problem(21, 34), addition.problem(10, 12)]
    end = [addition.TOKENS.index(addition.END_TOKEN)]
    texts = [
        "\\boxed{55}",
        "\\boxed{54}",
        "1+4+0=5;\\boxed{5",
        "\\boxed{22}",
        "2+2=4;",
        "\\boxed{2}",
    ]
    tokens = [tokenizer.encode(text) for text in texts]
    rows = [row if i in (2, 4) else row + end for i, row in enumerate(tokens)]
    # What pads a row may look like an answer: only the first `length` tokens count.
    rollout = make_rollout([[1]] * 6, rows, pad=5)
    earned, figures = rewards(rollout, problems, tokenizer, grade_all)
    assert earned.tolist() == [1, 0, 0, 1, 0, 0]
    assert figures == {
        "reward_mean": pytest.approx(1 / 3),
        "reward_equal_groups": 0.0,
        "reward_timeouts": 0,
    }
    same = make_rollout([[1]] * 6, [rows[0]] * 3 + rows[3:])
    assert rewards(same, problems, tokenizer, grade_all)[1]["reward_equal_groups"] == 0.5


def test_a_timeout_earns_nothing_and_is_counted(tokenizer):
    rollout = make_rollout([[1]] * 2, [tokenizer.encode("\\boxed{55}")] * 2)

    def slow(pairs):
        assert pairs == [("55", "\\boxed{55}")] * 2
        return [Verdict.TIMEOUT, Verdict.CORRECT]

    earned, figures = rewards(rollout, [addition.problem(21, 34)], tokenizer, slow)
    assert (earned.tolist(), figures["reward_timeouts"]) == ([0, 1], 1)


def test_golden_loss_with_every_clip():
    # Four tokens of two rows; ratios 1, 1.5, 0.5 and 4 under a flat student.
    log_ratio = np.log([1.0, 1.5, 0.5, 4.0])
    rollout = make_rollout(
        [[1], [1]],
        [[2, 3], [4, 5]],
        log_p=[(-LOG_V - log_ratio[:2]).tolist(), (-LOG_V - log_ratio[2:]).tolist()],
        log_t=[[np.nan] * 2] * 2,  # no teacher has said anything
    )
    advantage = in_float64([1, 0], 2)
    by_token = jnp.asarray(np.repeat(advantage[:, None], 2, axis=1), jnp.float32)
    update = make_update(bigram(V), METHODS["grpo"], Objective(), optax.sgd(1.0))
    params = {"table": jnp.zeros((V, V), jnp.float32)}
    state, stats = update(init_state(params, optax.sgd(1.0)), rollout, KEY, Extras(reward=by_token))
    good, bad = advantage
    # r = 1.5 is held at 1.2; r = 0.5 with A < 0 at 0.8; r = 4 at the dual bound 3.
    expected = (-good * 1.0 - good * 1.2 - bad * 0.8 - bad * 3.0) / 4
    np.testing.assert_allclose(stats["loss"], expected, rtol=1e-5)
    np.testing.assert_allclose(stats["ratio_clip_rate"], 2 / 4)
    np.testing.assert_allclose(stats["dual_clip_rate"], 1 / 4)
    # Only the first token still has a gradient: -A r (onehot - pi) / 4, with a rate of 1.
    moved = good / 4 * (np.eye(V)[2] - 1 / V)
    np.testing.assert_allclose(state.params["table"][1], moved, atol=1e-6)
    others = np.delete(np.asarray(state.params["table"]), 1, axis=0)
    np.testing.assert_allclose(others, 0.0, atol=1e-7)
