"""The first reading of student and teacher logits: all that the bridge can know before a beta."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from saki_jax.rollout.tiles import fold_vocabulary

GRID = (1 / 32, 1 / 8, 1 / 2, 1.0)  # betas at which the survey looks, rising to 1
_UNDERFLOW = 87.0  # -log of the smallest normal float32, rounded down


class Survey(NamedTuple):
    """What one reading of the logits tells about each row; float32 [*B] unless said."""

    max_p: Array  # largest student logit
    log_sum_p: Array  # log Σ exp(logits_p - max_p): log_p = (logits_p - max_p) - log_sum_p
    max_t: Array
    log_sum_t: Array
    shift: Array  # an ordinary value of d = logits_t - logits_p: d - shift has no common offset
    teacher_mode: Array  # int32, argmax T, the lowest id among equals
    entropy: Array  # H(p)
    nonfinite: Array  # bool: NaN, +inf or nothing but -inf in one of the models
    one_allowed: Array  # bool: no token has p = 0 < T, so beta = 1 has a finite KL
    kl_floor: Array  # KL(q_beta || p) as beta -> 0+: -log of p's mass where T > 0
    kl_pt: Array  # KL(p || T), p restricted to T > 0; it and the curve are good to about 1e-6
    curve_kl: Array  # [*B, 4] KL(q_beta || p) - kl_floor at the betas of GRID
    curve_norm: Array  # [*B, 4] L(beta) there, less the chord beta * offset

    @property
    def offset(self) -> Array:
        """log Σ exp(logits_t) - log Σ exp(logits_p) - shift; L(1) where the supports agree."""
        return (self.max_t - self.max_p - self.shift) + (self.log_sum_t - self.log_sum_p)


class _Sums(NamedTuple):
    """Running sums, relative to the running maxima: u = logits_p - max_p, w = logits_t - max_t."""

    max_p: Array
    max_t: Array
    mode_p_d: Array  # logits_t - logits_p at the student's mode so far
    mode_t: Array
    kept: Array  # Σ e^u where T > 0
    excluded: Array  # Σ e^u where T = 0
    t: Array  # Σ e^w
    pu: Array  # Σ e^u u
    pd: Array  # Σ e^u (w - u) where T > 0
    alien: Array  # largest teacher logit where p = 0
    mass: Array  # [*B, 4] Σ e^((1-beta) u + beta w) where p > 0 and T > 0
    slope: Array  # [*B, 4] the same, times (w - u)


def survey(logits_p: Float[Array, "*B V"], logits_t: Float[Array, "*B V"], *, tile: int) -> Survey:
    """Normalisers, modes, student entropy and a coarse curve of KL over beta, in one reading."""
    rows = logits_p.shape[:-1]
    zero, low = jnp.zeros(rows), jnp.full(rows, -jnp.inf)
    curve = jnp.zeros((*rows, len(GRID)))
    init = _Sums(
        max_p=low, max_t=low, mode_p_d=zero, mode_t=jnp.zeros(rows, jnp.int32), kept=zero,
        excluded=zero, t=zero, pu=zero, pd=zero, alien=low, mass=curve, slope=curve,
    )  # fmt: skip
    sums = fold_vocabulary(_add_tile, init, logits_p, logits_t, tile)

    # NaN and +inf leave NaN in the sums, a row of -inf leaves its maximum there.
    total = sums.kept + sums.excluded
    nonfinite = jnp.isnan(total + sums.t) | (jnp.minimum(sums.max_p, sums.max_t) == -jnp.inf)
    max_p, max_t = (jnp.where(nonfinite, 0.0, m) for m in (sums.max_p, sums.max_t))
    p, t = (jnp.where(nonfinite, 1.0, s) for s in (total, sums.t))
    log_sum_p, log_sum_t = jnp.log(p), jnp.log(t)
    # d at the student's mode, unless the teacher all but excludes that token.
    ordinary = sums.mode_p_d > (max_t - max_p) - _UNDERFLOW
    shift = jnp.where(ordinary, sums.mode_p_d, max_t - max_p)

    beta = jnp.asarray(GRID).reshape((1,) * len(rows) + (-1,))
    chord = (log_sum_t - log_sum_p)[..., None]
    norm = jnp.log(sums.mass) - log_sum_p[..., None] - beta * chord
    kl_floor = _minus_log_share(sums.kept, sums.excluded)
    return Survey(
        max_p=max_p,
        log_sum_p=log_sum_p,
        max_t=max_t,
        log_sum_t=log_sum_t,
        shift=jnp.where(nonfinite, 0.0, shift),
        teacher_mode=jnp.where(nonfinite, 0, sums.mode_t),
        entropy=jnp.where(nonfinite, 0.0, jnp.maximum(log_sum_p - sums.pu / p, 0.0)),
        nonfinite=nonfinite,
        one_allowed=sums.alien == -jnp.inf,
        kl_floor=kl_floor,
        kl_pt=log_sum_t - log_sum_p + kl_floor - sums.pd / sums.kept,
        curve_kl=beta * (sums.slope / sums.mass - chord) - norm - kl_floor[..., None],
        curve_norm=norm,
    )


def _minus_log_share(kept: Array, excluded: Array) -> Array:
    """-log(kept / (kept + excluded)), to full accuracy at both ends; at most what underflows."""
    total = kept + excluded
    exact = jnp.where(excluded < kept, -jnp.log1p(-excluded / total), jnp.log(total / kept))
    return jnp.minimum(exact, _UNDERFLOW)


def _add_tile(sums: _Sums, a: Array, b: Array, ids: Int[Array, "W"]) -> _Sums:
    """Adds one tile: student logits ``a`` and teacher logits ``b``, both [*B, W]."""
    top_p, top_t = jnp.max(a, axis=-1), jnp.max(b, axis=-1)
    # The lowest id of the maximum, by two plain reductions: argmax is slow on CPU.
    ids = ids.reshape((1,) * top_t.ndim + (-1,))
    at_top = jnp.where(b == top_t[..., None], ids, jnp.iinfo(jnp.int32).max)
    mode_t = jnp.min(at_top, axis=-1)
    earlier = (top_t == sums.max_t) & (mode_t < sums.mode_t)
    d_there = jnp.max(jnp.where(a == top_p[..., None], b, -jnp.inf), axis=-1) - top_p

    max_p, drop_p = _raise_maximum(sums.max_p, top_p)
    max_t, drop_t = _raise_maximum(sums.max_t, top_t)
    u, w = (x - jnp.where(m == -jnp.inf, 0.0, m)[..., None] for x, m in ((a, max_p), (b, max_t)))
    eu, ew = jnp.exp(u), jnp.exp(w)
    absent, excluded = a == -jnp.inf, b == -jnp.inf
    d = jnp.where(absent | excluded, 0.0, w - u)
    base = jnp.where(absent | excluded, -jnp.inf, u)
    tilted = [jnp.exp(base + beta * d) for beta in GRID]
    mass = jnp.stack([jnp.sum(x, axis=-1) for x in tilted], axis=-1)
    slope = jnp.stack([jnp.sum(x * d, axis=-1) for x in tilted], axis=-1)

    beta = jnp.asarray(GRID).reshape((1,) * drop_p.ndim + (-1,))
    scale_p, scale_t = jnp.exp(drop_p), jnp.exp(drop_t)
    scale = jnp.exp((1 - beta) * drop_p[..., None] + beta * drop_t[..., None])
    turn, total = drop_t - drop_p, sums.kept + sums.excluded
    return _Sums(
        max_p=max_p,
        max_t=max_t,
        mode_p_d=jnp.where(top_p > sums.max_p, d_there, sums.mode_p_d),
        mode_t=jnp.where((top_t > sums.max_t) | earlier, mode_t, sums.mode_t),
        kept=scale_p * sums.kept + _sum_where(~excluded, eu),
        excluded=scale_p * sums.excluded + _sum_where(excluded, eu),
        t=scale_t * sums.t + jnp.sum(ew, axis=-1),
        pu=scale_p * (sums.pu + drop_p * total) + _sum_where(~absent, eu * u),
        pd=scale_p * (sums.pd + turn * sums.kept) + jnp.sum(eu * d, axis=-1),
        alien=jnp.maximum(sums.alien, jnp.max(jnp.where(absent, b, -jnp.inf), axis=-1)),
        mass=scale * sums.mass + mass,
        slope=scale * (sums.slope + turn[..., None] * sums.mass) + slope,
    )


def _raise_maximum(old: Array, seen: Array) -> tuple[Array, Array]:
    """The new maximum and old - new; a first maximum has nothing before it to rescale."""
    new = jnp.maximum(old, seen)
    return new, jnp.where(old == -jnp.inf, 0.0, old - new)


def _sum_where(mask: Array, value: Array) -> Array:
    return jnp.sum(jnp.where(mask, value, 0.0), axis=-1)
