"""The token losses (paper 3.4, App. C and L; METHODS section 3), as pure functions of log-probs.

Everything works over any leading axes. Two rules hold throughout: what a mask excludes is replaced
*before* it meets exp, a product or a division (the gradient of ``where(mask, exp(x), 0)`` is NaN
where exp overflows), and the advantage is a constant to differentiation. K1 put into the loss
itself would have no teacher term in its gradient, and K3 would descend another divergence.
"""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Shaped

AGGREGATIONS = ("token_mean", "seq_mean", "micro_batch_mean")


@dataclass(frozen=True)
class Clips:
    """The bounds of METHODS section 3.

    Attributes:
      k1: |log pi - log T| is cut here before it becomes an advantage.
      ratio: the surrogate's trust region, r in [1 - ratio, 1 + ratio].
      dual: for A < 0 the loss is at most -dual * A.
      log_ratio: |log pi - log p_old| is cut here before exp.
    """

    k1: float = 10.0
    ratio: float = 0.2
    dual: float = 3.0
    log_ratio: float = 20.0


@dataclass(frozen=True)
class Objective:
    """The settings of the loss (METHODS section 3).

    Attributes:
      clips: bounds of the surrogate and of the advantage.
      advantage_logp: whose log pi(y) enters the advantage: "current", each forward's own,
        detached, or "rollout", the recorded log p.
      teacher_mode_coef: factor of -log pi(target) at distilled positions.
      aggregation, micro_batch_rows: see `objective.token_weights`.
      extrapolation: lambda of exopd; 1 makes it opd.
    """

    clips: Clips = field(default_factory=Clips)
    advantage_logp: str = "current"
    teacher_mode_coef: float = 1.0
    aggregation: str = "token_mean"
    micro_batch_rows: int = 8
    extrapolation: float = 1.25


@struct.dataclass
class Signals:
    """What an advantage may look at beside log pi(y), aligned like the rollout."""

    log_p: Float[Array, "*A B T"]  # recorded by the rollout
    log_t: Float[Array, "*A B T"]
    log_ref: Float[Array, "*A B T"] | None = None  # for methods that need a reference
    reward: Float[Array, "*A B T"] | None = None  # advantage from rewards, one value a row


@struct.dataclass
class TokenLoss:
    """A loss for each token and what the clips did to it; 0 and False outside the mask."""

    loss: Float[Array, "*B"]
    ratio_clipped: Bool[Array, "*B"]  # the trust region took the gradient away
    dual_clipped: Bool[Array, "*B"]  # the dual bound did
    log_ratio_clamped: Bool[Array, "*B"]


def k1_advantage(
    log_pi: Float[Array, "*B"], log_t: Float[Array, "*B"], *, clamp: float
) -> tuple[Float[Array, "*B"], Bool[Array, "*B"]]:
    """A = -clip(log pi(y) - log T(y), -clamp, clamp), detached, and where the clip acted.

    >>> k1_advantage(jnp.array([-0.5]), jnp.array([-20.5]), clamp=10.0)[0].tolist()
    [-10.0]
    """
    k1 = jax.lax.stop_gradient(log_pi - log_t)
    return -jnp.clip(k1, -clamp, clamp), jnp.abs(k1) > clamp


def extrapolated_advantage(
    log_pi: Float[Array, "*B"],
    log_t: Float[Array, "*B"],
    log_ref: Float[Array, "*B"],
    *,
    strength: float,
    clamp: float,
) -> tuple[Float[Array, "*B"], Bool[Array, "*B"]]:
    """ExOPD: A = (log T - log pi) + (strength - 1)(log T - log ref), clamped like K1, detached.

    `strength` is the paper's lambda and `log_ref` the initial student; at strength 1 this is
    `k1_advantage` to the bit.
    """
    k1 = (log_pi - log_t) - (strength - 1.0) * (log_t - log_ref)
    k1 = jax.lax.stop_gradient(k1)
    return -jnp.clip(k1, -clamp, clamp), jnp.abs(k1) > clamp


def surrogate(
    log_pi: Float[Array, "*B"],
    log_p_old: Float[Array, "*B"],
    advantage: Float[Array, "*B"],
    mask: Bool[Array, "*B"],
    clips: Clips,
) -> TokenLoss:
    """The clipped importance-ratio surrogate with dual clip, for each token (METHODS section 3).

    l = max(-A r, -A clip(r, 1 - c, 1 + c)), and l = min(l, -dual A) where A < 0, with
    r = exp(clip(log pi - log p_old)). Only `log_pi` is differentiated. Whatever stands outside
    `mask`, NaN and -inf included, has no effect on value or gradient.
    """
    advantage = jax.lax.stop_gradient(jnp.where(mask, advantage, 0.0))
    log_ratio = jnp.where(mask, log_pi, 0.0) - jax.lax.stop_gradient(
        jnp.where(mask, log_p_old, 0.0)
    )
    clamped = jnp.abs(log_ratio) > clips.log_ratio
    ratio = jnp.exp(jnp.clip(log_ratio, -clips.log_ratio, clips.log_ratio))
    free = -advantage * ratio
    held = -advantage * jnp.clip(ratio, 1.0 - clips.ratio, 1.0 + clips.ratio)
    loss = jnp.maximum(free, held)
    bound = -clips.dual * advantage
    dual_clipped = (advantage < 0) & (loss > bound)
    return TokenLoss(
        loss=jnp.where(dual_clipped, bound, loss),
        ratio_clipped=held > free,
        dual_clipped=dual_clipped,
        log_ratio_clamped=clamped,
    )


def masked_nll(log_pi: Float[Array, "*B"], mask: Bool[Array, "*B"]) -> Float[Array, "*B"]:
    """-log pi(target) where `mask` holds, exactly 0 (value and gradient) elsewhere."""
    return jnp.where(mask, -log_pi, 0.0)


def masked_sum(values: Shaped[Array, "*B"], mask: Bool[Array, "*B"]) -> Float[Array, ""]:
    """Σ of `values` where `mask` holds, float32; what is masked out may be anything."""
    return jnp.where(mask, values, 0).astype(jnp.float32).sum()


def masked_mean(values: Shaped[Array, "*B"], mask: Bool[Array, "*B"]) -> Float[Array, ""]:
    """Mean of `values` where `mask` holds; 0 where it holds nowhere."""
    return masked_sum(values, mask) / jnp.maximum(mask.sum(), 1).astype(jnp.float32)


def token_weights(
    aggregation: str, valid: Bool[Array, "B T"], micro_batch_rows: int
) -> tuple[Float[Array, "B T"], Float[Array, ""]]:
    """(weights, denominator) with loss = Σ weights * token loss / denominator.

      token_mean: every valid token counts alike; denominator N_valid (the paper's).
      seq_mean: every row with a valid token counts alike.
      micro_batch_mean: emulates older code that divides each micro-batch by its own token count
        and averages the quotients. Its micro-batches are `micro_batch_rows` consecutive rows of
        the rollout, whatever passes the trainer itself makes of them.

    All sums run over the whole batch, so that no result depends on how the trainer cuts or packs
    it. An empty batch has denominator 0: the caller skips the step.
    """
    ones = valid.astype(jnp.float32)
    if aggregation == "token_mean":
        return ones, ones.sum()
    rows = {"seq_mean": 1, "micro_batch_mean": micro_batch_rows}[aggregation]
    groups = -(-valid.shape[0] // rows)
    tokens = jnp.pad(ones.sum(axis=1), (0, groups * rows - valid.shape[0]))
    tokens = tokens.reshape(groups, rows).sum(axis=1)
    of_row = jnp.repeat(tokens, rows)[: valid.shape[0]]
    weights = ones / jnp.maximum(of_row, 1.0)[:, None]
    return weights, (tokens > 0).sum().astype(jnp.float32)
