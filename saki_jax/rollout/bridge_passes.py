"""The two kinds of reading that the bridge needs: a survey of both models, a measurement at a beta.

Each is a fold over tiles of the vocabulary, so that temporaries are [*B, tile], never [*B, V].
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

GRID = (1 / 32, 1 / 8, 1 / 2, 1.0)  # betas at which the survey looks, rising to 1
_SERIES_RADIUS = 0.5  # |x| up to which p expm1(x) and p phi(x) go by their series


class Survey(NamedTuple):
    """What one reading of the logits tells about each row; float32 [*B] unless said."""

    max_p: Array  # largest student logit
    log_sum_p: Array  # log Σ exp(logits_p - max_p): log_p = (logits_p - max_p) - log_sum_p
    max_t: Array
    log_sum_t: Array
    shift: Array  # logits_t - logits_p at the student's mode: d - shift has no common offset
    teacher_mode: Array  # int32, argmax T, the lowest id among equals
    entropy: Array  # H(p)
    nonfinite: Array  # bool: NaN, +inf or nothing but -inf in one of the models
    one_allowed: Array  # bool: no token has p = 0 < T, so beta = 1 has a finite KL
    kl_floor: Array  # KL(q_beta || p) as beta -> 0+: -log of p's mass where T > 0
    kl_pt: Array  # KL(p || T) over the tokens with T > 0; this and the next good to about 1e-6
    curve_kl: Array  # [*B, 4] KL(q_beta || p) - kl_floor at the betas of GRID
    curve_norm: Array  # [*B, 4] L(beta) there, less the chord beta·offset

    @property
    def offset(self) -> Array:
        """log Σ exp(logits_t) - log Σ exp(logits_p) - shift; L(1) where the supports agree."""
        return (self.max_t - self.max_p - self.shift) + (self.log_sum_t - self.log_sum_p)


class Measurement(NamedTuple):
    """The bridge measured at one beta a row; all [*B] float32."""

    beta: Array
    log_norm: Array  # L(beta) = log Σ p exp(beta (d - shift))
    kl: Array  # KL(q || p)
    tv: Array  # TV(p, q)
    variance: Array  # Var_q(log q - log p) = dKL / dlog beta
    noise: Array  # what a poor guess of L may have added to the error of kl


def fold_vocabulary(
    step: Callable, init, logits_p: Float[Array, "*B V"], logits_t: Float[Array, "*B V"], tile: int
):
    """Folds ``step(carry, a, b, first_id) -> carry`` over float32 tiles of the two logits.

    The remainder is a shorter last tile: nothing is padded, nothing copied. A vocabulary that
    fits one tile takes no loop.
    """
    vocab = logits_p.shape[-1]
    if vocab <= tile:
        return step(init, logits_p.astype(jnp.float32), logits_t.astype(jnp.float32), 0)

    read_p, read_t = _reader(logits_p), _reader(logits_t)
    whole = vocab // tile

    def visit(carry, first, width):
        return step(carry, read_p(first, width), read_t(first, width), first)

    carry = lax.fori_loop(0, whole, lambda i, c: visit(c, i * tile, tile), init)
    rest = vocab - whole * tile
    return visit(carry, whole * tile, rest) if rest else carry


def _reader(logits: Float[Array, "*B V"]) -> Callable:
    """``(first, width) -> float32 [*B, width]``, converting no more than it is asked for."""
    # A 16-bit float is sliced as an integer: XLA on CPU would convert the whole array first.
    bits = logits
    if logits.dtype.itemsize == 2:
        bits = lax.bitcast_convert_type(logits, jnp.uint16)

    def read(first, width):
        piece = lax.dynamic_slice_in_dim(bits, first, width, axis=-1)
        return lax.bitcast_convert_type(piece, logits.dtype).astype(jnp.float32)

    return read


class _Sums(NamedTuple):
    """Running sums of the survey, relative to the running maxima: u = a - max_p, w = b - max_t."""

    max_p: Array
    max_t: Array
    mode_p_d: Array  # d at the student's mode so far
    mode_t: Array
    p: Array  # Σ e^u
    t: Array  # Σ e^w
    pu: Array  # Σ e^u u
    excluded: Array  # Σ e^u where w = -inf
    pd: Array  # Σ e^u (w - u) where w is finite
    alien: Array  # largest b where a = -inf
    mass: Array  # [*B, 4] Σ e^((1-beta) u + beta w)
    slope: Array  # [*B, 4] the same, times (w - u)


def survey(logits_p: Float[Array, "*B V"], logits_t: Float[Array, "*B V"], *, tile: int) -> Survey:
    """Normalisers, modes, student entropy and a coarse curve of KL over beta in one reading."""
    rows = logits_p.shape[:-1]
    zero, low = jnp.zeros(rows), jnp.full(rows, -jnp.inf)
    curve = jnp.zeros((*rows, len(GRID)))
    init = _Sums(
        max_p=low, max_t=low, mode_p_d=zero, mode_t=jnp.zeros(rows, jnp.int32), p=zero, t=zero,
        pu=zero, excluded=zero, pd=zero, alien=low, mass=curve, slope=curve,
    )  # fmt: skip
    sums = fold_vocabulary(_survey_tile, init, logits_p, logits_t, tile)

    # NaN and +inf leave NaN in the sums, a row of -inf leaves its maximum there.
    nonfinite = jnp.isnan(sums.p + sums.t) | (jnp.minimum(sums.max_p, sums.max_t) == -jnp.inf)
    max_p, max_t = (jnp.where(nonfinite, 0.0, m) for m in (sums.max_p, sums.max_t))
    p, t = (jnp.where(nonfinite, 1.0, s) for s in (sums.p, sums.t))
    log_sum_p, log_sum_t = jnp.log(p), jnp.log(t)
    shift = jnp.where(jnp.isfinite(sums.mode_p_d), sums.mode_p_d, max_t - max_p)

    beta = jnp.asarray(GRID).reshape((1,) * len(rows) + (-1,))
    tilt_norm = (log_sum_t - log_sum_p)[..., None]
    norm = jnp.log(sums.mass) - log_sum_p[..., None] - beta * tilt_norm
    excluded = jnp.where(nonfinite, 0.0, sums.excluded / p)
    kl_floor = -jnp.log1p(-excluded)
    curve_kl = beta * (sums.slope / sums.mass - tilt_norm) - norm - kl_floor[..., None]
    return Survey(
        max_p=max_p,
        log_sum_p=log_sum_p,
        max_t=max_t,
        log_sum_t=log_sum_t,
        shift=jnp.where(nonfinite, 0.0, shift),
        teacher_mode=jnp.where(nonfinite, 0, sums.mode_t),
        entropy=jnp.where(nonfinite, 0.0, log_sum_p - sums.pu / p),
        nonfinite=nonfinite,
        one_allowed=sums.alien == -jnp.inf,
        kl_floor=kl_floor,
        kl_pt=log_sum_t - log_sum_p - sums.pd / (p - sums.excluded),
        curve_kl=curve_kl,
        curve_norm=norm,
    )


def _survey_tile(sums: _Sums, a: Array, b: Array, first: Array | int) -> _Sums:
    """Adds one tile: student logits ``a``, teacher logits ``b``, both [*B, W]."""
    top_p, top_t = jnp.max(a, axis=-1), jnp.max(b, axis=-1)
    # The lowest id of the maximum, by two plain reductions: argmax is slow on CPU.
    ids = lax.broadcasted_iota(jnp.int32, b.shape, b.ndim - 1)
    where_t = jnp.min(jnp.where(b == top_t[..., None], ids, b.shape[-1] - 1), axis=-1)
    d_there = jnp.max(jnp.where(a == top_p[..., None], b, -jnp.inf), axis=-1) - top_p

    max_p, drop_p = _raise_maximum(sums.max_p, top_p)
    max_t, drop_t = _raise_maximum(sums.max_t, top_t)
    u, w = (x - jnp.where(m == -jnp.inf, 0.0, m)[..., None] for x, m in ((a, max_p), (b, max_t)))
    eu, ew = jnp.exp(u), jnp.exp(w)
    absent = (u == -jnp.inf) | (w == -jnp.inf)
    d = jnp.where(absent, 0.0, w - u)
    base = jnp.where(absent, -jnp.inf, u)
    tilted = [jnp.exp(base + beta * d) for beta in GRID]
    mass = jnp.stack([jnp.sum(x, axis=-1) for x in tilted], axis=-1)
    slope = jnp.stack([jnp.sum(x * d, axis=-1) for x in tilted], axis=-1)

    beta = jnp.asarray(GRID).reshape((1,) * drop_p.ndim + (-1,))
    scale_p, scale_t = jnp.exp(drop_p), jnp.exp(drop_t)
    scale = jnp.exp((1 - beta) * drop_p[..., None] + beta * drop_t[..., None])
    turn = drop_t - drop_p
    return _Sums(
        max_p=max_p,
        max_t=max_t,
        mode_p_d=jnp.where(top_p > sums.max_p, d_there, sums.mode_p_d),
        mode_t=jnp.where(top_t > sums.max_t, first + where_t, sums.mode_t),
        p=scale_p * sums.p + jnp.sum(eu, axis=-1),
        t=scale_t * sums.t + jnp.sum(ew, axis=-1),
        pu=scale_p * (sums.pu + drop_p * sums.p) + _sum_where(eu > 0, eu * u),
        excluded=scale_p * sums.excluded + _sum_where(w == -jnp.inf, eu),
        pd=scale_p * (sums.pd + turn * (sums.p - sums.excluded)) + jnp.sum(eu * d, axis=-1),
        alien=jnp.maximum(sums.alien, jnp.max(jnp.where(u == -jnp.inf, b, -jnp.inf), axis=-1)),
        mass=scale * sums.mass + mass,
        slope=scale * (sums.slope + turn[..., None] * sums.mass) + slope,
    )


def _raise_maximum(old: Array, seen: Array) -> tuple[Array, Array]:
    """The new maximum and old - new; a first maximum has nothing before it to rescale."""
    new = jnp.maximum(old, seen)
    return new, jnp.where(old == -jnp.inf, 0.0, old - new)


def _sum_where(mask: Array, value: Array) -> Array:
    return jnp.sum(jnp.where(mask, value, 0.0), axis=-1)


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
    level = beta * (s.max_t - s.max_p - s.shift) - s.log_sum_p - log_norm
    beta, log_norm, level, shift, max_p, log_sum_p, max_t = (
        r[..., None] for r in (beta, log_norm, level, s.shift, s.max_p, s.log_sum_p, s.max_t)
    )
    u = a - max_p
    log_p = u - log_sum_p
    x = beta * ((b - a) - shift) - log_norm
    mean = (1 - beta) * u + beta * (b - max_t) + level
    log_q = jnp.where(jnp.abs(x) <= _SERIES_RADIUS, log_p + x, mean)
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
