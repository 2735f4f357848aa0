"""The methods of the comparison as rows of one table (METHODS section 4)."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from saki_jax.train import losses, objective, routing
from saki_jax.train.forward_kl import forward_kl
from saki_jax.train.objective import Objective, Signals

# What generates the responses.
EXACT_Q = "exact_q"  # the student drafts, the teacher verifies, the coupling realises q
STUDENT_ONLY = "student_only"  # plain sampling; a teacher only scores afterwards
INTERLEAVED = "interleaved"  # the student drafts, the teacher replaces what it would not say

# What the update wants beyond the rollout.
NOTHING = "nothing"
TEACHER_SAMPLE = "teacher_sample"  # a draw from T at corrections, made by the engine
REFERENCE = "reference"  # log-probabilities of the initial student
TEACHER_LOGITS = "teacher_logits"  # the teacher's distributions, computed again in the update
REWARDS = "rewards"  # of the decoded responses; then no teacher is needed anywhere


@struct.dataclass
class Extras:
    """What an update is given beyond the rollout; None where the method does not need it."""

    log_ref: Float[Array, "B T"] | None = None  # log-probabilities of the initial student
    reward: Float[Array, "B T"] | None = None  # advantage from rewards, one value a row
    teacher_params: Any = None  # for a loss over the teacher's distributions


def distillation_advantage(
    log_pi: Float[Array, "B T"], signals: Signals, settings: Objective
) -> tuple[Float[Array, "B T"], jax.Array]:
    """Sampled-token reverse KL: every method but exopd and grpo. Returns (A, clamped)."""
    return objective.k1_advantage(log_pi, signals.log_t, clamp=settings.clips.k1)


def extrapolated_advantage(
    log_pi: Float[Array, "B T"], signals: Signals, settings: Objective
) -> tuple[Float[Array, "B T"], jax.Array]:
    """exopd: the distillation advantage, carried beyond the teacher, away from the reference."""
    return objective.extrapolated_advantage(
        log_pi,
        signals.log_t,
        signals.log_ref,
        strength=settings.extrapolation,
        clamp=settings.clips.k1,
    )


def reward_advantage(
    log_pi: Float[Array, "B T"], signals: Signals, settings: Objective
) -> tuple[Float[Array, "B T"], jax.Array]:
    """grpo: what the response earned within its group, the same for all of its tokens."""
    del settings
    return signals.reward, jnp.zeros(log_pi.shape, bool)


@dataclass(frozen=True)
class Method:
    """One row: everything in which a method differs from another.

    Attributes:
      rollout: what generates (EXACT_Q falls back to STUDENT_ONLY where epsilon is exactly 0).
      needs: what the update wants beyond the rollout.
      route: (rollout, key) -> which positions get a teacher token, and which one.
      advantage: (log pi(y), signals, settings) -> (A, clamped) for the other positions; None for a
        loss that has none.
      loss: hidden states of a micro-batch -> weighted sum over its tokens.
    """

    rollout: str
    needs: str
    route: routing.Route
    advantage: losses.Advantage | None
    loss: losses.Loss = losses.routed_surrogate


K1 = distillation_advantage

METHODS: dict[str, Method] = {
    "saki": Method(EXACT_Q, NOTHING, routing.at_corrections, K1),
    "trb": Method(EXACT_Q, NOTHING, routing.nowhere, K1),
    "random_tm": Method(EXACT_Q, NOTHING, routing.at_random, K1),
    "tv_weighted_tm": Method(EXACT_Q, NOTHING, routing.at_high_tv, K1),
    "teacher_sampled": Method(EXACT_Q, TEACHER_SAMPLE, routing.at_corrections_sampled, K1),
    "opd": Method(STUDENT_ONLY, NOTHING, routing.nowhere, K1),
    "exopd": Method(STUDENT_ONLY, REFERENCE, routing.nowhere, extrapolated_advantage),
    "skd": Method(INTERLEAVED, TEACHER_LOGITS, routing.nowhere, None, forward_kl),
    "grpo": Method(STUDENT_ONLY, REWARDS, routing.nowhere, reward_advantage),
}
