"""The options of the loss, through the whole update."""

import functools

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from saki_jax.train import setup
from saki_jax.train.baselines import METHODS, Extras
from saki_jax.train.config import default_config
from saki_jax.train.objective import Clips, Objective
from saki_jax.train.state import init_state
from saki_jax.train.update import make_update
from train_toys import KEY, bigram, make_rollout

V = 8
LOG_V = float(np.log(V))
SGD = optax.sgd(1.0)


def rollout_of(losses, log_ratio=0.0):
    """Token losses `losses` under a flat student, where the ratio is 1."""
    return make_rollout(
        [[1]] * len(losses),
        [[2 + t % 5 for t in range(len(row))] for row in losses],
        log_p=[[-LOG_V - log_ratio] * len(row) for row in losses],
        log_t=[[-LOG_V - x for x in row] for row in losses],
    )


@functools.cache
def update_of(method, tokens, objective):
    return make_update(bigram(V), METHODS[method], objective, SGD, tokens_per_micro_batch=tokens)


def one_update(rollout, method="opd", tokens=16384, **objective):
    update = update_of(method, tokens, Objective(**objective))
    state = init_state({"table": jnp.zeros((V, V), jnp.float32)}, SGD)
    log_ref = jnp.full(rollout.tokens.shape, -LOG_V)
    return update(state, rollout, KEY, Extras(log_ref=log_ref))


# Rows of 2, 6 and 1 tokens, whose means are 2, 0.5 and 4.
LOSSES = [[1.0, 3.0], [0.5] * 6, [4.0]]


@pytest.mark.parametrize(
    ("aggregation", "rows", "loss"),
    [
        ("token_mean", 2, 11 / 9),
        ("seq_mean", 2, (2 + 0.5 + 4) / 3),
        ("micro_batch_mean", 2, (7 / 8 + 4) / 2),  # two rows, then what is left
    ],
)
def test_aggregations_by_hand_whatever_the_trainer_packs_together(aggregation, rows, loss):
    options = {"aggregation": aggregation, "micro_batch_rows": rows}
    for tokens in (1, 16384):  # one row a pass, and all in one
        _, stats = one_update(rollout_of(LOSSES), tokens=tokens, **options)
        np.testing.assert_allclose(stats["loss"], loss, rtol=1e-6)


def test_clamp_and_clip_values_are_free_and_their_rates_are_told():
    losses = [[1.0, 3.0, -5.0, 0.5]]
    _, stats = one_update(rollout_of(losses), clips=Clips(k1=2.0))
    np.testing.assert_allclose(stats["loss"], (1 + 2 - 2 + 0.5) / 4, rtol=1e-6)
    np.testing.assert_allclose(stats["k1_clamp_rate"], 0.5)
    # All ratios are 2: held at 1.5 where A > 0, bounded by 1.25 where A < 0.
    clips = Clips(ratio=0.5, dual=1.25)
    _, stats = one_update(rollout_of(losses, log_ratio=np.log(2)), clips=clips)
    np.testing.assert_allclose(stats["loss"], (1.25 * 4.5 - 1.5 * 5) / 4, rtol=1e-5)
    np.testing.assert_allclose([stats["ratio_clip_rate"], stats["dual_clip_rate"]], [0.25, 0.75])
    # The exponent is cut at log 1.1, before any other clip sees the ratio.
    clips = Clips(log_ratio=float(np.log(1.1)))
    _, stats = one_update(rollout_of(losses, log_ratio=np.log(2)), clips=clips)
    np.testing.assert_allclose(stats["loss"], 1.1 * -0.5 / 4, rtol=1e-4)
    assert (stats["log_ratio_clamp_rate"], stats["ratio_clip_rate"]) == (1.0, 0.0)


@pytest.mark.parametrize("method", ["opd", "exopd"])
def test_the_advantage_takes_the_log_probability_that_is_asked_for(method):
    """Trainer and rollout differ by 0.1, and the ratio is not part of it."""
    rollout = rollout_of([[1.0]], log_ratio=0.1)
    means = {
        source: float(one_update(rollout, method, advantage_logp=source)[1]["advantage_mean"])
        for source in ("current", "rollout")
    }
    np.testing.assert_allclose(means["rollout"] - means["current"], 0.1, atol=1e-6)


def test_the_configuration_reaches_the_objective():
    config = default_config()
    changes = {
        "advantage_logp": "rollout",
        "aggregation": "micro_batch_mean",
        "micro_batch_rows": 3,
        "teacher_mode_coef": 0.5,
        "extrapolation": 1.5,
        "k1_clip": 5.0,
        "ratio_clip": 0.1,
        "dual_clip": 2.0,
        "log_ratio_clip": 7.0,
    }
    config.objective.update(changes)
    assert set(changes) == set(config.objective.keys())
    assert setup._objective(config) == Objective(
        clips=Clips(k1=5.0, ratio=0.1, dual=2.0, log_ratio=7.0),
        advantage_logp="rollout",
        teacher_mode_coef=0.5,
        aggregation="micro_batch_mean",
        micro_batch_rows=3,
        extrapolation=1.5,
    )


def test_the_coefficient_scales_the_teacher_mode_part_alone():
    rollout = rollout_of([[1.0, 3.0]])
    rollout = rollout.replace(corrected=rollout.valid.at[0, 0].set(False))
    (_, one), (_, half) = (one_update(rollout, "saki", teacher_mode_coef=c) for c in (1.0, 0.5))
    np.testing.assert_allclose(one["loss_teacher_mode"], LOG_V / 2, rtol=1e-6)
    np.testing.assert_allclose(half["loss_teacher_mode"], LOG_V / 4, rtol=1e-6)
    assert one["loss_surrogate"] == half["loss_surrogate"]
