"""Maximal coupling of the student's proposal with the bridge (paper 3.3, appendices G and I).

z ~ p is kept with probability min(1, q(z)/p(z)); otherwise y ~ [q - p]+ / TV(p, q). Then y ~ q and
Pr(y corrected) = TV(p, q).
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from saki_jax.rollout.bridge import Bridge, log_ratios
from saki_jax.rollout.keys import gumbel, gumbel_at
from saki_jax.rollout.tiles import default_tile, fold_vocabulary


def draw(logits: Float[Array, "*B V"], keys: jax.Array) -> Int[Array, "*B"]:
    """One token of softmax(logits) a row, by Gumbel-max; ``keys`` [*B].

    Exact, and stable: logits that differ by rounding give the same token but for near ties. A row
    with NaN or without any finite logit gives some id inside the vocabulary; such rows are flagged
    by the bridge (`Bridge.nonfinite`).
    """
    score = logits.astype(jnp.float32) + gumbel(keys, logits.shape[-1])
    # The first maximum by two plain reductions: argmax is slow on CPU.
    top = jnp.max(score, axis=-1, keepdims=True)
    ids = lax.broadcasted_iota(jnp.int32, score.shape, score.ndim - 1)
    return jnp.min(jnp.where(score == top, ids, score.shape[-1] - 1), axis=-1)


def rejects(v: Float[Array, "*B"], x: Float[Array, "*B"]) -> Bool[Array, "*B"]:
    """Whether a proposal with log-ratio x = log q(z) - log p(z) is rejected by the uniform v.

    In complementary form, because 1 - q/p keeps its digits where q is close to p: reject iff
    v < rho = -expm1(min(x, 0)) or rho >= 1. A token with q = 0 is rejected by every v, one with
    q >= p by none.
    """
    rho = -jnp.expm1(jnp.minimum(x, 0.0))
    return (v < rho) | (rho >= 1)


def accept_probability(x: Float[Array, "*B"]) -> Float[Array, "*B"]:
    """min(1, q(z) / p(z)) from x = log q(z) - log p(z)."""
    return jnp.exp(jnp.minimum(x, 0.0))


def draw_residual(
    bridge: Bridge,
    logits_p: Float[Array, "*B V"],
    logits_t: Float[Array, "*B V"],
    keys: jax.Array,
) -> tuple[Int[Array, "*B"], Bool[Array, "*B"]]:
    """A correction y ~ [q - p]+ / TV(p, q) for each row given, and whether there is one.

    Args:
      bridge: the solved bridge of these rows (index it down to the rejected rows first).
      logits_p, logits_t: the logits from which it was solved.
      keys: [*B], purpose RESIDUAL.

    Returns:
      Tokens and ``found``. Where ``found`` is False no token has q > p: after rounding p and q are
      equal, so keep the proposal, count it as accepted and report a residual mass of 0.
    """
    vocab = logits_p.shape[-1]

    def step(best: tuple, a: Array, b: Array, ids: Array) -> tuple:
        score, token = best
        _, _, log_q, x = log_ratios(bridge, a, b)
        # log [q - p]+ = log q + log(1 - e^-x)
        weight = jnp.where(x > 0, log_q + jnp.log(-jnp.expm1(-x)), -jnp.inf)
        noisy = weight + gumbel_at(keys, ids)
        top = jnp.max(noisy, axis=-1)
        inside = jnp.broadcast_to(ids, noisy.shape)
        first = jnp.min(jnp.where(noisy == top[..., None], inside, vocab - 1), axis=-1)
        # Of equals the lowest id, in whatever order the tiles come.
        better = (top > score) | ((top == score) & (first < token))
        return jnp.where(better, top, score), jnp.where(better, first, token)

    rows = logits_p.shape[:-1]
    none = (jnp.full(rows, -jnp.inf), jnp.full(rows, vocab - 1, jnp.int32))
    score, token = fold_vocabulary(step, none, logits_p, logits_t, default_tile())
    return token, score > -jnp.inf
