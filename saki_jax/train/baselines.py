"""The methods of the comparison as rows of one table (METHODS section 4)."""

from collections.abc import Callable
from dataclasses import dataclass, field

import jax
from flax import struct
from jaxtyping import Array, Float

from saki_jax.train import objective, routing
from saki_jax.train.objective import Clips

# What generates the responses.
EXACT_Q = "exact_q"  # the student drafts, the teacher verifies, the coupling realises q
STUDENT_ONLY = "student_only"  # plain sampling; the teacher only scores afterwards

# What the update wants beyond the rollout.
NOTHING = "nothing"
TEACHER_SAMPLE = "teacher_sample"  # a draw from T at corrections, made by the engine
REFERENCE = "reference"  # log-probabilities of the initial student

# What the token loss is made of.
ROUTED_SURROGATE = "routed_surrogate"


@dataclass(frozen=True)
class Objective:
    """The settings of the loss (METHODS section 3).

    Attributes:
      clips: bounds of the surrogate and of the advantage.
      advantage_logp: whose log pi(y) enters the advantage: "current", each forward's own,
        detached, or "rollout", the recorded log p.
      teacher_mode_coef: factor of -log pi(target) at distilled positions.
      aggregation: see `objective.token_weights`.
      extrapolation: lambda of exopd; 1 makes it opd.
    """

    clips: Clips = field(default_factory=Clips)
    advantage_logp: str = "current"
    teacher_mode_coef: float = 1.0
    aggregation: str = "token_mean"
    extrapolation: float = 1.25


@struct.dataclass
class Signals:
    """What an advantage may look at beside log pi(y), aligned like the rollout."""

    log_p: Float[Array, "*A B T"]  # recorded by the rollout
    log_t: Float[Array, "*A B T"]
    log_ref: Float[Array, "*A B T"] | None = None  # for methods that need a reference


Advantage = Callable[[jax.Array, Signals, Objective], tuple[jax.Array, jax.Array]]


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


@dataclass(frozen=True)
class Method:
    """One row: everything in which a method differs from another.

    Attributes:
      rollout: what generates (EXACT_Q falls back to STUDENT_ONLY where epsilon is exactly 0).
      needs: what the update wants beyond the rollout.
      route: (rollout, key) -> which positions get a teacher token, and which one.
      advantage: (log pi(y), signals, settings) -> (A, clamped) for the other positions.
      loss: what the token loss is made of.
    """

    rollout: str
    needs: str
    route: routing.Route
    advantage: Advantage
    loss: str = ROUTED_SURROGATE


K1 = distillation_advantage

METHODS: dict[str, Method] = {
    "saki": Method(EXACT_Q, NOTHING, routing.at_corrections, K1),
    "trb": Method(EXACT_Q, NOTHING, routing.nowhere, K1),
    "random_tm": Method(EXACT_Q, NOTHING, routing.at_random, K1),
    "tv_weighted_tm": Method(EXACT_Q, NOTHING, routing.at_high_tv, K1),
    "teacher_sampled": Method(EXACT_Q, TEACHER_SAMPLE, routing.at_corrections_sampled, K1),
    "opd": Method(STUDENT_ONLY, NOTHING, routing.nowhere, K1),
    "exopd": Method(STUDENT_ONLY, REFERENCE, routing.nowhere, extrapolated_advantage),
}
