"""Measuring the bridge at a given beta, in one reading of the logits and without cancellation."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from saki_jax.rollout.bridge_survey import Survey
from saki_jax.rollout.tiles import fold_vocabulary

_SERIES_RADIUS = 0.5  # |x| up to which p expm1(x) and p phi(x) go by their series


class Measurement(NamedTuple):
    """The bridge measured at one beta a row; all [*B] float32."""

    beta: Array
    log_norm: Array  # L(beta) = log Σ p exp(beta (d - shift))
    kl: Array  # KL(q || p)
    tv: Array  # TV(p, q)
    variance: Array  # Var_q(log q - log p) = dKL / dlog beta
    noise: Array  # what a poor guess of L may have added to the error of kl
    off: Array  # by how much the guess of L was too low


def tilt(
    s: Survey,
    beta: Float[Array, "*B"],
    log_norm: Float[Array, "*B"],
    a: Float[Array, "*B W"],
    b: Float[Array, "*B W"],
) -> tuple[Float[Array, "*B W"], Float[Array, "*B W"], Float[Array, "*B W"]]:
    """(log_p, log_q, x = log q - log p) of some entries, for 0 < beta <= 1 and a given L(beta).

    x = beta (d - shift) - L keeps its digits where q is close to p. Elsewhere log q is taken as the
    mean (1 - beta) log_p + beta log_t, which keeps them (log_p = -1e4 and beta = 1 - 1e-4).
    p = 0 gives (-inf, -inf, 0), T = 0 gives log_q = x = -inf.
    """
    level = beta * (s.max_t - s.max_p - s.shift) - s.log_sum_p - log_norm
    beta, log_norm, level, shift, max_p, log_sum_p, max_t = (
        r[..., None] for r in (beta, log_norm, level, s.shift, s.max_p, s.log_sum_p, s.max_t)
    )
    u = a - max_p
    log_p = u - log_sum_p
    x = beta * ((b - a) - shift) - log_norm
    mean = (1 - beta) * u + beta * (b - max_t) + level
    near = jnp.abs(x) <= _SERIES_RADIUS
    log_q = jnp.where(near, log_p + x, mean)
    x = jnp.where(near, x, mean - log_p)
    absent, excluded = a == -jnp.inf, b == -jnp.inf
    x = jnp.where(absent, 0.0, jnp.where(excluded, -jnp.inf, x))
    log_q = jnp.where(absent | excluded, -jnp.inf, log_q)
    return log_p, log_q, x


def measure(
    logits_p: Float[Array, "*B V"],
    logits_t: Float[Array, "*B V"],
    s: Survey,
    beta: Float[Array, "*B"],
    guess: Float[Array, "*B"],
    *,
    tile: int,
) -> Measurement:
    """KL, L, TV and the slope at ``beta`` in one reading, without cancellation.

    With x = beta (d - shift) - guess and phi(x) = x e^x - expm1(x) >= 0:
    M = Σ p expm1(x), L = guess + log1p(M), KL = Σ p phi(x) / (1+M) + M / (1+M) - log1p(M).
    Any guess of L gives the right value in exact arithmetic; a wrong one costs digits of O(M²).

    Args:
      logits_p, logits_t: student's and teacher's logits.
      s: their survey.
      beta: where to measure, in (0, 1]; 1 only where ``s.one_allowed``.
      guess: of L(beta), for the shifted log-ratios.
      tile: vocabulary entries read at a time.
    """

    def step(sums, a, b, _):
        log_p, log_q, x = tilt(s, beta, guess, a, b)
        p, q = jnp.exp(log_p), jnp.exp(log_q)
        qx = jnp.where(q > 0, q * x, 0.0)
        near = jnp.abs(x) <= _SERIES_RADIUS
        gain = jnp.where(near, p * _expm1(x), q - p)
        phi = jnp.where(near, p * _phi(x), qx - (q - p))
        new = (
            gain,
            phi,
            jnp.where(q > 0, qx * x, 0.0),
            jnp.maximum(gain, 0.0),
            jnp.where(x > 0, q, 0.0),
        )
        return tuple(total + jnp.sum(term, axis=-1) for total, term in zip(sums, new, strict=True))

    init = (jnp.zeros(beta.shape),) * 5
    m, phi, qxx, tv, q_above = fold_vocabulary(step, init, logits_p, logits_t, tile)
    total, off, gap = 1 + m, jnp.log1p(m), _second_order(m)
    return Measurement(
        beta=beta,
        log_norm=guess + off,
        kl=phi / total + gap,
        # The guess was off by log1p(m); to first order that moves the mass above p only.
        tv=jnp.clip(tv - off * q_above, 0.0, 1.0),
        variance=jnp.maximum(qxx / total - ((phi + m) / total) ** 2, 0.0),  # Σ q x = phi + m
        noise=-2e-6 * gap,
        off=off,
    )


def _expm1(x: Array) -> Array:
    """expm1 for |x| <= 0.5 by its series, to 1e-8; cheaper than the library's."""
    series = jnp.float32(1 / 40320)
    for c in (1 / 5040, 1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0):
        series = series * x + jnp.float32(c)
    return x * series


def _phi(x: Array) -> Array:
    """x e^x - expm1(x) = Σ_{k>=2} (k-1) x^k / k! for |x| <= 0.5, to 1e-8."""
    series = jnp.float32(8 / 362880)
    for c in (7 / 40320, 6 / 5040, 5 / 720, 4 / 120, 3 / 24, 2 / 6, 1 / 2):
        series = series * x + jnp.float32(c)
    return x * x * series


def _second_order(m: Array) -> Array:
    """m / (1 + m) - log1p(m) = -m²/2 + 2m³/3 - 3m⁴/4 + ... <= 0."""
    series = -m * m * (1 / 2 - m * (2 / 3 - m * (3 / 4 - m * (4 / 5 - m * 5 / 6))))
    return jnp.where(jnp.abs(m) < 0.02, series, m / (1 + m) - jnp.log1p(m))
