"""Losses of a micro-batch: hidden states in, a weighted sum over its tokens out."""

import functools
from collections.abc import Callable
from typing import NamedTuple, no_type_check

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Shaped

from saki_jax.models.token_logprobs import token_logprobs
from saki_jax.train.examples import Examples
from saki_jax.train.objective import Objective, Signals, masked_nll, masked_sum, surrogate

Head = Callable[[jax.Array], jax.Array]  # hidden [*B, D] -> logits [*B, V]
Advantage = Callable[[jax.Array, Signals, Objective], tuple[jax.Array, jax.Array]]


class Predictor(NamedTuple):
    """What predicts the response tokens: hidden states [B, T, D], and the head over them."""

    head: Head
    hidden: jax.Array


@no_type_check  # the same tree carries shapes
@struct.dataclass
class Report:
    """What a loss tells of a micro-batch; scalars.

    Attributes:
      parts: the loss by its parts, weighted sums over tokens: their sum is the loss.
      means: (sum, count) of what is reported as a mean over the whole batch.
      peaks: what is reported as the largest over the whole batch; not negative.
    """

    parts: dict[str, jax.Array]
    means: dict[str, tuple[jax.Array, jax.Array]]
    peaks: dict[str, jax.Array]

    def merged(self, other: "Report") -> "Report":
        """The report of two micro-batches together."""
        add = functools.partial(jax.tree.map, jnp.add)
        return Report(
            parts=add(self.parts, other.parts),
            means=add(self.means, other.means),
            peaks=jax.tree.map(jnp.maximum, self.peaks, other.peaks),
        )


Loss = Callable[..., tuple[jax.Array, Report]]  # called like `routed_surrogate`


def response_hidden(hidden: Float[Array, "B T D"], examples: Examples) -> Float[Array, "B T D"]:
    """The hidden states that predict a response token; zeros elsewhere.

    Masked here, before the head, what padding computed reaches neither value nor gradient.
    """
    return jnp.where(examples.routed.valid[:, :, None], hidden, 0)


def response_logprobs(
    head: Head, hidden: Float[Array, "B T D"], examples: Examples, *, chunk: int
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """(log pi(y), log pi(target)) in one pass over the vocabulary; 0 where not valid.

    Slots that predict no response token, those of prompts among them, are not given to the head.
    Ids outside the vocabulary in masked slots are harmless.
    """
    valid = examples.routed.valid
    targets = jnp.stack([examples.tokens, examples.routed.target], axis=-1)
    targets = jnp.where(valid[:, :, None], targets, 0)
    log_pi, _ = token_logprobs(head, hidden, targets, wanted=valid, chunk=chunk)
    return log_pi[..., 0], log_pi[..., 1]


def routed_surrogate(
    student: Predictor,
    teacher: Predictor | None,
    examples: Examples,
    advantage: Advantage,
    objective: Objective,
    chunk: int,
) -> tuple[Float[Array, ""], Report]:
    """Σ weights * token loss, and what is reported of it.

    Each valid position has exactly one loss: the surrogate, or -log pi(target) where the route
    distils. What the teacher has to say is in `examples.signals`; `teacher` is not looked at.
    """
    del teacher
    log_pi, log_pi_target = response_logprobs(student.head, student.hidden, examples, chunk=chunk)
    routed, signals, weights = examples.routed, examples.signals, examples.weights
    free = routed.valid & ~routed.distilled
    own = signals.log_p if objective.advantage_logp == "rollout" else log_pi
    values, clamped = advantage(own, signals, objective)
    terms = surrogate(log_pi, signals.log_p, values, free, objective.clips)
    nll = masked_nll(log_pi_target, routed.distilled)
    parts = {
        "loss_surrogate": (weights * terms.loss).sum(),
        "loss_teacher_mode": objective.teacher_mode_coef * (weights * nll).sum(),
    }
    gaps = logprob_gaps(log_pi, examples)
    report = Report(
        parts=parts,
        means={
            "teacher_mode_rate": mean_over(routed.distilled, routed.valid),
            "teacher_mode_nll": mean_over(nll, routed.distilled),
            "advantage_mean": mean_over(values, free),
            "k1_clamp_rate": mean_over(clamped, free),
            "ratio_clip_rate": mean_over(terms.ratio_clipped, free),
            "dual_clip_rate": mean_over(terms.dual_clipped, free),
            "log_ratio_clamp_rate": mean_over(terms.log_ratio_clamped, free),
            "log_p_gap_mean": mean_over(gaps, routed.valid),
        },
        peaks={"log_p_gap_max": gaps.max()},
    )
    return sum(parts.values()), jax.lax.stop_gradient(report)


def logprob_gaps(log_pi: Float[Array, "B T"], examples: Examples) -> Float[Array, "B T"]:
    """|log pi(y) here - log p(y) of the rollout|, 0 where not valid."""
    return jnp.where(examples.routed.valid, jnp.abs(log_pi - examples.signals.log_p), 0.0)


def mean_over(values: Shaped[Array, "*B"], mask: Bool[Array, "*B"]) -> tuple[jax.Array, jax.Array]:
    """(sum, count) of `values` where `mask` holds, float32, for `Report.means`."""
    return masked_sum(values, mask), masked_sum(mask, mask)
