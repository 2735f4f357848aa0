"""The two kinds of reading that the bridge needs: a survey of both models, a measurement at a beta.

Each is a fold over tiles of the vocabulary, so that temporaries are [*B, tile], never [*B, V].
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

TILE = 8192
_SERIES_RADIUS = 0.5  # |x| up to which p·expm1(x) and p·phi(x) go by their series


class Survey(NamedTuple):
    """What one reading of the logits tells about each row; all [*B], float32 unless said."""

    max_p: Array  # largest student logit
    log_sum_p: Array  # log Σ exp(logits_p - max_p): log_p = (logits_p - max_p) - log_sum_p
    max_t: Array
    log_sum_t: Array
    shift: Array  # logits_t - logits_p at the student's mode; d - shift has no common offset
    teacher_mode: Array  # int32, argmax T, the lowest id among equals
    entropy: Array  # H(p)
    kl_pt: Array  # KL(p || T), good to about 1e-6 absolute; inf where T excludes a token of p
    kl_tp: Array  # KL(T || p), likewise
    one_allowed: Array  # bool: no token has p = 0 < T, so beta = 1 has a finite KL
    nonfinite: Array  # bool: NaN, +inf or nothing but -inf in one of the models

    @property
    def offset(self) -> Array:
        """L(1) of the shifted log-ratios, log Σ p exp(d - shift)."""
        return (self.max_t - self.max_p - self.shift) + (self.log_sum_t - self.log_sum_p)


class Measurement(NamedTuple):
    """The bridge measured at one beta a row; all [*B] float32."""

    beta: Array
    log_norm: Array  # L(beta) = log Σ p exp(beta (d - shift))
    kl: Array  # KL(q || p)
    tv: Array  # TV(p, q)
    variance: Array  # Var_q(x), x = log q - log p; dKL/dlog beta
    trusted: Array  # bool: the guess of L was close enough for kl to be a certificate


def fold_vocabulary(
    step: Callable, init, logits_p: Float[Array, "*B V"], logits_t: Float[Array, "*B V"], tile: int
):
    """Folds ``step(carry, a, b, first_id) -> carry`` over float32 tiles of the two logits.

    What is not there is -inf: the last tile starts early and hides the entries seen before, so
    nothing is padded and nothing copied. A vocabulary that fits one tile takes no loop.
    """
    vocab = logits_p.shape[-1]
    if vocab <= tile:
        return step(init, logits_p.astype(jnp.float32), logits_t.astype(jnp.float32), 0)

    def body(i, carry):
        first = jnp.minimum(i * tile, vocab - tile)
        seen = jnp.arange(tile) + first < i * tile
        seen = seen.reshape((1,) * (logits_p.ndim - 1) + (tile,))
        a, b = (
            lax.dynamic_slice_in_dim(logits, first, tile, axis=-1).astype(jnp.float32)
            for logits in (logits_p, logits_t)
        )
        return step(carry, jnp.where(seen, -jnp.inf, a), jnp.where(seen, -jnp.inf, b), first)

    return lax.fori_loop(0, -(-vocab // tile), body, init)


class _Sums(NamedTuple):
    """Running sums of the survey, relative to the running maxima."""

    max_p: Array
    max_t: Array
    mode_p_d: Array  # d at the student's mode so far
    mode_t: Array
    p: Array  # Σ e^u, u = a - max_p
    t: Array  # Σ e^w, w = b - max_t
    pu: Array  # Σ e^u u
    pw: Array  # Σ e^u w
    tu: Array
    tw: Array
    one_allowed: Array
    bad: Array


def survey(
    logits_p: Float[Array, "*B V"], logits_t: Float[Array, "*B V"], *, tile: int = TILE
) -> Survey:
    """Normalisers, modes, student entropy and both divergences in one reading."""
    rows = logits_p.shape[:-1]
    zero, low = jnp.zeros(rows), jnp.full(rows, -jnp.inf)
    no, yes = jnp.zeros(rows, bool), jnp.ones(rows, bool)
    init = _Sums(low, low, zero, jnp.zeros(rows, jnp.int32), *[zero] * 6, yes, no)
    sums = fold_vocabulary(_survey_tile, init, logits_p, logits_t, tile)

    nothing = (sums.max_p == -jnp.inf) | (sums.max_t == -jnp.inf)
    nonfinite = sums.bad | nothing
    max_p, max_t = (jnp.where(nonfinite, 0.0, m) for m in (sums.max_p, sums.max_t))
    p, t = (jnp.where(nonfinite, 1.0, s) for s in (sums.p, sums.t))
    log_sum_p, log_sum_t = jnp.log(p), jnp.log(t)
    shift = jnp.where(jnp.isfinite(sums.mode_p_d), sums.mode_p_d, max_t - max_p)
    entropy = log_sum_p - sums.pu / p
    return Survey(
        max_p=max_p,
        log_sum_p=log_sum_p,
        max_t=max_t,
        log_sum_t=log_sum_t,
        shift=jnp.where(nonfinite, 0.0, shift),
        teacher_mode=jnp.where(nonfinite, 0, sums.mode_t),
        entropy=jnp.where(nonfinite, 0.0, entropy),
        kl_pt=jnp.where(nonfinite, 0.0, jnp.maximum(log_sum_t - sums.pw / p - entropy, 0.0)),
        kl_tp=jnp.where(
            nonfinite, 0.0, jnp.maximum(log_sum_p - sums.tu / t - log_sum_t + sums.tw / t, 0.0)
        ),
        one_allowed=sums.one_allowed,
        nonfinite=nonfinite,
    )


def _survey_tile(sums: _Sums, a: Array, b: Array, first: Int[Array, ""] | int) -> _Sums:
    """Adds one tile: student logits ``a``, teacher logits ``b``, both [*B, tile]."""
    top_p, top_t = jnp.max(a, axis=-1), jnp.max(b, axis=-1)
    where_p, where_t = jnp.argmax(a, axis=-1), jnp.argmax(b, axis=-1)
    d_there = jnp.take_along_axis(b, where_p[..., None], axis=-1)[..., 0] - top_p

    max_p, drop_p, scale_p = _raise_maximum(sums.max_p, top_p)
    max_t, drop_t, scale_t = _raise_maximum(sums.max_t, top_t)
    u, w = a - _finite(max_p)[..., None], b - _finite(max_t)[..., None]
    eu, ew = jnp.exp(u), jnp.exp(w)
    bad = jnp.isnan(a) | jnp.isnan(b) | (a == jnp.inf) | (b == jnp.inf)
    return _Sums(
        max_p=max_p,
        max_t=max_t,
        mode_p_d=jnp.where(top_p > sums.max_p, d_there, sums.mode_p_d),
        mode_t=jnp.where(top_t > sums.max_t, first + where_t.astype(jnp.int32), sums.mode_t),
        p=scale_p * sums.p + jnp.sum(eu, axis=-1),
        t=scale_t * sums.t + jnp.sum(ew, axis=-1),
        pu=scale_p * (sums.pu + drop_p * sums.p) + _sum_times(eu, u),
        pw=scale_p * (sums.pw + drop_t * sums.p) + _sum_times(eu, w),
        tu=scale_t * (sums.tu + drop_p * sums.t) + _sum_times(ew, u),
        tw=scale_t * (sums.tw + drop_t * sums.t) + _sum_times(ew, w),
        one_allowed=sums.one_allowed & ~jnp.any((a == -jnp.inf) & (b > -jnp.inf), axis=-1),
        bad=sums.bad | jnp.any(bad, axis=-1),
    )


def _raise_maximum(old: Array, seen: Array) -> tuple[Array, Array, Array]:
    """(new maximum, old - new, exp(old - new)); a first maximum has nothing to rescale."""
    new = jnp.maximum(old, seen)
    first = old == -jnp.inf
    drop = jnp.where(first, 0.0, old - new)
    return new, drop, jnp.exp(drop)


def _finite(maximum: Array) -> Array:
    return jnp.where(maximum == -jnp.inf, 0.0, maximum)


def _sum_times(weight: Array, value: Array) -> Array:
    """Σ weight·value where a weight of 0 silences an infinite value."""
    return jnp.sum(jnp.where(weight > 0, weight * value, 0.0), axis=-1)


def tilt(
    s: Survey,
    beta: Float[Array, "*B"],
    log_norm: Float[Array, "*B"],
    a: Float[Array, "*B W"],
    b: Float[Array, "*B W"],
) -> tuple[Float[Array, "*B W"], Float[Array, "*B W"], Float[Array, "*B W"]]:
    """(log_p, log_q, x = log q - log p) of some entries, for 0 < beta <= 1 and a given L(beta).

    x = beta (d - shift) - L keeps its digits where q is close to p; log q as the mean
    (1 - beta) log_p + beta log_t keeps them where it is not (log_p = -1e4 and beta = 1 - 1e-4).
    p = 0 gives (-inf, -inf, 0), T = 0 gives log_q = x = -inf.
    """
    beta, log_norm, shift, offset, max_p, log_sum_p, max_t, log_sum_t = (
        r[..., None]
        for r in (
            beta, log_norm, s.shift, s.offset, s.max_p, s.log_sum_p, s.max_t, s.log_sum_t,
        )
    )  # fmt: skip
    absent, excluded = a == -jnp.inf, b == -jnp.inf
    log_p = (a - max_p) - log_sum_p
    log_t = (b - max_t) - log_sum_t
    x = beta * (b - a - shift) - log_norm
    mean = (1 - beta) * log_p + beta * log_t + (beta * offset - log_norm)
    log_q = jnp.where(jnp.abs(x) <= _SERIES_RADIUS, log_p + x, mean)
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
    tile: int = TILE,
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
        near = jnp.abs(x) <= _SERIES_RADIUS
        p, q = jnp.exp(log_p), jnp.exp(log_q)
        kept = q > 0
        gain = jnp.where(near, p * _expm1(x), q - p)
        phi = jnp.where(near, p * _phi(x), jnp.where(kept, q * x, 0.0) - (q - p))
        above = x > 0
        new = (
            gain,
            phi,
            jnp.where(kept, q * x, 0.0),
            jnp.where(kept, q * x * x, 0.0),
            jnp.where(above, gain, 0.0),
            jnp.where(above, q, 0.0),
        )
        return tuple(total + jnp.sum(term, axis=-1) for total, term in zip(sums, new, strict=True))

    init = (jnp.zeros(beta.shape),) * 6
    m, phi, qx, qxx, tv, q_above = fold_vocabulary(step, init, logits_p, logits_t, tile)
    total = 1 + m
    kl = phi / total + _log_gap(m)
    # The guess is off by log1p(m); to first order that moves only the mass above p.
    off = jnp.log1p(m)
    return Measurement(
        beta=beta,
        log_norm=guess + off,
        kl=kl,
        tv=jnp.maximum(tv - off * q_above, 0.0),
        variance=jnp.maximum(qxx / total - (qx / total) ** 2, 0.0),
        trusted=m * m <= 4 * kl,
    )


def _expm1(x: Array) -> Array:
    """expm1 for |x| <= 0.5 by its series to 1e-8, cheaper than the library's."""
    return x * (1 + x / 2 * (1 + x / 3 * (1 + x / 4 * (1 + x / 5 * (1 + x / 6 * (1 + x / 7 * (
        1 + x / 8)))))))  # fmt: skip


def _phi(x: Array) -> Array:
    """x e^x - expm1(x) = Σ_{k>=2} (k-1) x^k / k! for |x| <= 0.5."""
    # Coefficients (k-1)/k!, k = 2..10.
    series = jnp.float32(9 / 3628800)
    for c in (8 / 362880, 7 / 40320, 6 / 5040, 5 / 720, 4 / 120, 3 / 24, 2 / 6, 1 / 2):
        series = series * x + jnp.float32(c)
    return x * x * series


def _log_gap(m: Array) -> Array:
    """m / (1 + m) - log1p(m) <= 0, of second order in m."""
    # -m²/2 + 2m³/3 - 3m⁴/4 + ...
    series = -m * m * (1 / 2 - m * (2 / 3 - m * (3 / 4 - m * (4 / 5 - m * 5 / 6))))
    return jnp.where(jnp.abs(m) < 0.02, series, m / (1 + m) - jnp.log1p(m))
