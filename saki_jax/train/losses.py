"""Losses of a micro-batch: hidden states in, a weighted sum over its tokens out."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from saki_jax.models.token_logprobs import token_logprobs
from saki_jax.train.examples import Examples
from saki_jax.train.objective import Objective, Signals, masked_nll, masked_sum, surrogate

Stats = dict[str, jax.Array]
Head = Callable[[jax.Array], jax.Array]  # hidden [*B, D] -> logits [*B, V]
Advantage = Callable[[jax.Array, Signals, Objective], tuple[jax.Array, jax.Array]]
Loss = Callable[..., tuple[jax.Array, Stats]]  # called like `routed_surrogate`


def response_hidden(hidden: Float[Array, "B S D"], examples: Examples) -> Float[Array, "B T D"]:
    """The hidden states that predict the response tokens; zeros where not valid.

    Response position t of a row is predicted at sequence position prompt_length - 1 + t, whatever
    the padding. Masked here, before the head, what padding computed reaches neither value nor
    gradient.
    """
    valid = examples.routed.valid
    at = examples.prompt_length[:, None] - 1 + jnp.arange(valid.shape[1])[None, :]
    at = jnp.clip(at, 0, hidden.shape[1] - 1)
    found = jnp.take_along_axis(hidden, at[:, :, None], axis=1)
    return jnp.where(valid[:, :, None], found, 0)


def response_logprobs(
    head: Head, hidden: Float[Array, "B T D"], examples: Examples, *, chunk: int
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """(log pi(y), log pi(target)) in one pass over the vocabulary; junk where not valid.

    Ids outside the vocabulary in masked slots are harmless.
    """
    targets = jnp.stack([examples.tokens, examples.routed.target], axis=-1)
    targets = jnp.where(examples.routed.valid[:, :, None], targets, 0)
    log_pi, _ = token_logprobs(head, hidden, targets, chunk=chunk)
    return log_pi[..., 0], log_pi[..., 1]


def routed_surrogate(
    head: Head,
    hidden: Float[Array, "B T D"],
    examples: Examples,
    weights: Float[Array, "B T"],
    advantage: Advantage,
    objective: Objective,
    chunk: int,
) -> tuple[Float[Array, ""], Stats]:
    """Σ weights * token loss, and sums of what is reported.

    Each valid position has exactly one loss: the surrogate, or -log pi(target) where the route
    distils.
    """
    log_pi, log_pi_target = response_logprobs(head, hidden, examples, chunk=chunk)
    routed, signals = examples.routed, examples.signals
    free = routed.valid & ~routed.distilled
    own = signals.log_p if objective.advantage_logp == "rollout" else log_pi
    values, clamped = advantage(own, signals, objective)
    terms = surrogate(log_pi, signals.log_p, values, free, objective.clips)
    nll = masked_nll(log_pi_target, routed.distilled)
    loss_surrogate = (weights * terms.loss).sum()
    loss_teacher_mode = objective.teacher_mode_coef * (weights * nll).sum()
    gap = jnp.where(routed.valid, jnp.abs(log_pi - signals.log_p), 0.0)
    stats = {
        "loss_surrogate": loss_surrogate,
        "loss_teacher_mode": loss_teacher_mode,
        "surrogate_tokens": masked_sum(free, free),
        "teacher_mode_tokens": masked_sum(routed.distilled, routed.distilled),
        "teacher_mode_nll": nll.sum(),
        "advantage": masked_sum(values, free),
        "advantage_clamped": masked_sum(clamped, free),
        "ratio_clipped": masked_sum(terms.ratio_clipped, free),
        "dual_clipped": masked_sum(terms.dual_clipped, free),
        "log_ratio_clamped": masked_sum(terms.log_ratio_clamped, free),
        "log_p_gap": gap.sum(),
        "log_p_gap_max": gap.max(),
    }
    return loss_surrogate + loss_teacher_mode, jax.lax.stop_gradient(stats)
