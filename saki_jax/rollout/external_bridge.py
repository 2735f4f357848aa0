"""Bridge and coupling on the host, in vectorised NumPy, for the loop outside the engine.

The law of bridge.py and coupling.py in float64: straight sums are then accurate enough, and the
code is as fast as a careful float32 one. Rows are worked through in groups that fit the processor's
cache, on all its cores (NumPy lets go of the interpreter inside its loops).
"""

import os
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Float32, Int

_GROUP = 2**17  # logits of one model that are worked on together
_MOST_PASSES = 60
_TOLERANCE = 4e-5  # a row is done from epsilon (1 - tolerance) on, as in the engine
_LOWEST = -1e5  # stands for log 0 where it is multiplied by an exact 0
_BELOW_ONE = 1 - 2.0**-24


class HostBridge(NamedTuple):
    """A solved bridge, [R] each: `bridge.Bridge` on the host."""

    beta: np.ndarray
    kl: np.ndarray
    tv: np.ndarray
    log_norm: np.ndarray  # L(beta) = log Σ p exp(beta (d - shift)), d = b - a
    shift: np.ndarray
    log_sum_p: np.ndarray  # log_p = a - log_sum_p
    log_sum_t: np.ndarray
    entropy: np.ndarray
    teacher_mode: np.ndarray
    nonfinite: np.ndarray

    def rows(self, index: np.ndarray) -> "HostBridge":
        """Some of the rows."""
        return HostBridge(*(field[index] for field in self))


def solve(
    a: Float32[np.ndarray, "R V"], b: Float32[np.ndarray, "R V"], epsilon: float
) -> HostBridge:
    """The largest beta with KL(q || p) <= epsilon for each row of student and teacher logits.

    A probability below the smallest float64 counts as 0, and keeps q = 0.
    """
    size = max(1, _GROUP // a.shape[1])
    groups = [slice(i, i + size) for i in range(0, a.shape[0], size)]
    workers = min(len(groups), os.cpu_count() or 1)
    if workers < 2:
        parts = [_solve_group(a[g], b[g], epsilon) for g in groups]
    else:
        with ThreadPoolExecutor(workers) as pool:
            parts = list(pool.map(lambda g: _solve_group(a[g], b[g], epsilon), groups))
    return HostBridge(*(np.concatenate(fields) for fields in zip(*parts, strict=True)))


def _solve_group(a: np.ndarray, b: np.ndarray, epsilon: float) -> HostBridge:
    top_p, top_t = a.max(axis=1), b.max(axis=1)
    nonfinite = ~(np.isfinite(top_p) & np.isfinite(top_t))  # the maximum of NaN is NaN
    if nonfinite.any():
        a, b = (np.where(nonfinite[:, None], np.float32(0), x) for x in (a, b))
        top_p, top_t = (np.where(nonfinite, np.float32(0), x) for x in (top_p, top_t))

    p, mean_u, log_sum_p = _softmax(a, top_p)
    t, _, log_sum_t = _softmax(b, top_t)
    entropy = (log_sum_p - top_p) - mean_u
    absent, excluded = p == 0, np.isneginf(b)
    one_allowed = ~(absent & (t > 0)).any(axis=1)
    anything_excluded = (excluded & ~absent).any(axis=1)

    # d over the support of q; elsewhere the weight is 0 and d may be anything finite.
    outside = absent | excluded
    with np.errstate(invalid="ignore"):
        d = np.where(outside, 0.0, np.subtract(b, a, dtype=np.float64))
    weight = np.where(outside, 0.0, p)
    # Relative to its largest value, so that no exponential overflows.
    shift = np.where(outside, -np.inf, d).max(axis=1)
    nothing_shared = np.isneginf(shift)
    shift = np.where(nothing_shared, 0.0, shift)
    d = np.minimum(d - shift[:, None], 0.0)

    offset = (log_sum_t - log_sum_p) - shift  # log T - log p = d - offset
    kl_pt = np.where(anything_excluded, np.inf, offset - _dot(p, d))
    kl_tp = np.where(one_allowed, _dot(np.where(outside, 0.0, t), d) - offset, np.inf)
    beta, kl, log_norm = _search(weight, d, kl_pt, kl_tp, epsilon, nothing_shared | nonfinite)

    at_one = one_allowed & (kl_tp <= epsilon) & (epsilon > 0)
    beta = np.where(at_one, 1.0, beta)
    log_norm = np.where(at_one, offset, log_norm)
    kl = np.where(at_one, np.maximum(kl_tp, 0.0), kl)
    gain = weight * np.exp(beta[:, None] * d - log_norm[:, None]) - weight
    tv = np.where(beta > 0, np.maximum(gain, 0.0).sum(axis=1), 0.0)
    return HostBridge(
        beta, kl, tv, log_norm, shift, log_sum_p, log_sum_t, entropy, b.argmax(axis=1), nonfinite
    )


def _softmax(logits: np.ndarray, top: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(probabilities, their mean of logits - top, log Σ exp logits) in float64."""
    u = np.maximum(np.subtract(logits, top[:, None], dtype=np.float64), _LOWEST)
    p = np.exp(u)
    total = p.sum(axis=1)
    p /= total[:, None]
    return p, _dot(p, u), np.log(total) + top


def _dot(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.einsum("rv,rv->r", x, y)


def _search(
    weight: np.ndarray,
    d: np.ndarray,
    kl_pt: np.ndarray,
    kl_tp: np.ndarray,
    epsilon: float,
    hopeless: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Newton's method for log KL as a function of log beta inside the measured bracket.

    Returns beta (< 1), KL and L of the best feasible point measured; zeros where there is none.
    """
    rows = len(d)
    beta, kl, log_norm = np.zeros(rows), np.zeros(rows), np.zeros(rows)
    if epsilon <= 0:
        return beta, kl, log_norm
    high, high_known = np.full(rows, _BELOW_ONE), np.zeros(rows, bool)
    floor = np.maximum(epsilon / (epsilon + kl_pt), 1e-30)
    guess = np.sqrt(epsilon / np.maximum(kl_tp, epsilon))
    point = np.where(np.isfinite(kl_pt), np.maximum(floor, guess), 0.5 * guess)
    point = np.clip(point, 1e-30, _BELOW_ONE)
    live = np.flatnonzero(~hopeless & (kl_tp > epsilon))

    for _ in range(_MOST_PASSES):
        if live.size == 0:
            break
        some = live if live.size < rows else slice(None)
        at = point[live]
        here, norm, variance = _measure(weight[some], d[some], at)
        good = here <= epsilon
        raised, lowered = live[good], live[~good]
        beta[raised], kl[raised], log_norm[raised] = at[good], here[good], norm[good]
        high[lowered], high_known[lowered] = at[~good], True

        close = good & (here >= epsilon * (1 - _TOLERANCE))
        following = _newton(at, here, variance, epsilon)
        low = beta[live]
        following = np.where(high_known[live], following, np.minimum(following, high[live]))
        inside = (following > low) & ((following < high[live]) | ~high_known[live])
        middle = np.sqrt(np.where(low > 0, low, 0.5 * floor[live]) * high[live])
        middle = np.where((middle > low) & (middle < high[live]), middle, 0.5 * (low + high[live]))
        following = np.where(inside, following, middle)
        exhausted = (following <= low) | (high_known[live] & (following >= high[live]))
        point[live] = following
        live = live[~(close | exhausted)]
    return beta, kl, log_norm


def _measure(
    weight: np.ndarray, d: np.ndarray, beta: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(KL, L, Var_q(beta d)) at beta > 0: KL = beta L' - L."""
    w = np.exp(beta[:, None] * d)
    w *= weight
    total = w.sum(axis=1)
    w *= d
    mean = w.sum(axis=1) / total
    square = _dot(w, d) / total
    log_norm = np.log(total)
    variance = np.maximum(square - mean**2, 0.0) * beta**2
    return np.maximum(beta * mean - log_norm, 0.0), log_norm, variance


def _newton(beta: np.ndarray, kl: np.ndarray, variance: np.ndarray, epsilon: float) -> np.ndarray:
    """The step in (log beta, log KL); NaN or infinite where there is none, to be refused."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        aim = np.log(epsilon * (1 - _TOLERANCE / 2))
        return beta * np.exp((aim - np.log(kl)) * kl / variance)


def terms(
    bridge: HostBridge, a: Float[np.ndarray, "R W"], b: Float[np.ndarray, "R W"]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(log_p, log_t, log_q, x = log q - log p) of entries with logits ``a`` and ``b``, [R, W]."""
    beta, log_norm, shift, log_sum_p, log_sum_t = (
        field[:, None]
        for field in (
            bridge.beta,
            bridge.log_norm,
            bridge.shift,
            bridge.log_sum_p,
            bridge.log_sum_t,
        )
    )
    a, b = a.astype(np.float64), b.astype(np.float64)
    log_p, log_t = a - log_sum_p, b - log_sum_t
    with np.errstate(invalid="ignore"):
        x = np.where(beta == 0, 0.0, beta * (b - a - shift) - log_norm)
    # p = 0 is never proposed and has q = 0; T = 0 has q = 0.
    x = np.where(np.isneginf(a), 0.0, x)
    log_q = np.where(beta == 1, log_t, log_p + x)
    return log_p, log_t, log_q, x


def rejects(v: Float32[np.ndarray, "R"], x: Float[np.ndarray, "R"]) -> Bool[np.ndarray, "R"]:
    """Whether the uniform v rejects a proposal with log-ratio x; see `coupling.rejects`."""
    rho = -np.expm1(np.minimum(x, 0.0))
    return (v < rho) | (rho >= 1)


def draw_residual(
    bridge: HostBridge,
    a: Float32[np.ndarray, "R V"],
    b: Float32[np.ndarray, "R V"],
    noise: Float32[np.ndarray, "R V"],
) -> tuple[Int[np.ndarray, "R"], Bool[np.ndarray, "R"]]:
    """y ~ [q - p]+ / TV by Gumbel-max, and whether any token has q > p; [R] each."""
    _, _, log_q, x = terms(bridge, a, b)
    above = x > 0
    with np.errstate(divide="ignore", invalid="ignore"):
        score = np.where(above, log_q + np.log(-np.expm1(-x)) + noise, -np.inf)
    return score.argmax(axis=1), above.any(axis=1)
