"""The largest feasible beta by repeated measurement; solvers differ in where they look next.

All keep the same books: the best measured feasible point, the nearest measured infeasible one, and
the rows that are done. What is returned was measured, so KL(q || p) <= epsilon is a certificate,
whatever the search did.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from saki_jax.rollout.bridge_measure import Measurement, measure
from saki_jax.rollout.bridge_survey import GRID, Survey

_BELOW_ONE = 1 - 2.0**-24  # the largest float32 below 1
_WAVES = 16  # halvings of the paper's bisection
_MOST_PASSES = 60  # a guard; no solver comes near it
_PATIENCE = 16  # passes after which every second one halves the bracket
# Float32 measures KL to about 1e-5 relative at worst. A point is feasible up to 1e-5 below epsilon,
# a row is done within 5e-5 of it, and the middle is aimed at.
_FEASIBLE, _AIM, _DONE = 1 - 1e-5, 1 - 3e-5, 1 - 5e-5
_BLUR = 3e-4  # error of L that the reported TV may carry, relative to it
_CURVE_NOISE = 2e-6  # rounding of the survey's curve, times what its KL is a difference of


class Search(NamedTuple):
    """The carry of a solver's loop; [*B] each but for ``passes``."""

    beta: Array  # to be measured next
    guess: Array  # of L there
    lower: Measurement  # best feasible point; beta = 0 until one is found
    upper: Array  # beta of the nearest infeasible point, or the top
    bounded: Array  # bool: upper is infeasible, not just the top
    done: Array
    used: Array  # int32, passes that the row took part in
    passes: Array  # scalar int32


def certified_newton(
    logits_p: Float[Array, "*B V"],
    logits_t: Float[Array, "*B V"],
    s: Survey,
    epsilon: Float[Array, ""],
    *,
    tile: int,
) -> Search:
    """Newton's method for log KL as a function of log beta, held inside the measured bracket.

    The curve is nearly straight there, with slope 2 at the left. The start is read off the
    survey's curve.
    """
    start, upper, bounded = _read_curve(s, epsilon)
    search = _open(s, epsilon, start, upper, bounded)
    return _run(search, logits_p, logits_t, s, epsilon, _newton, tile)


def sixteen_waves(
    logits_p: Float[Array, "*B V"],
    logits_t: Float[Array, "*B V"],
    s: Survey,
    epsilon: Float[Array, ""],
    *,
    tile: int,
) -> Search:
    """The paper's bisection: beta = 1 if that is feasible, else the feasible end of 16 halvings."""
    top = _top(s)
    search = _open(s, epsilon, top, top, jnp.zeros_like(s.nonfinite))
    return _run(search, logits_p, logits_t, s, epsilon, _halve, tile)


SOLVERS: dict[str, Callable] = {"newton": certified_newton, "bisect": sixteen_waves}


def _open(s: Survey, epsilon: Array, start: Array, upper: Array, bounded: Array) -> Search:
    """The books before the first measurement."""
    zero = jnp.zeros_like(start)
    # A teacher without enough of p leaves no feasible beta > 0.
    hopeless = s.nonfinite | (epsilon <= 0) | (s.kl_floor > epsilon * _FEASIBLE)
    return Search(
        beta=start,
        guess=_guess_norm(s, start, epsilon),
        lower=Measurement(*[zero] * len(Measurement._fields)),
        upper=upper,
        bounded=bounded,
        done=hopeless,
        used=jnp.zeros(start.shape, jnp.int32),
        passes=jnp.int32(0),
    )


def _run(search: Search, logits_p, logits_t, s, epsilon, propose: Callable, tile: int) -> Search:
    """Measures until every row is done."""

    def unfinished(search: Search):
        return (search.passes < _MOST_PASSES) & ~jnp.all(search.done)

    def one_pass(search: Search) -> Search:
        point = measure(logits_p, logits_t, s, search.beta, search.guess, tile=tile)
        return _record(search, point, s, epsilon, propose)

    return lax.while_loop(unfinished, one_pass, search)


def _record(search: Search, point: Measurement, s, epsilon, propose: Callable) -> Search:
    """Enters a measurement into the books and chooses the next beta of the rows not done."""
    live = ~search.done
    # What was certified once stays so when it is measured again.
    repeated = point.beta == search.lower.beta
    feasible = repeated | (point.kl + point.noise <= epsilon * _FEASIBLE)
    infeasible = ~feasible & (point.kl - point.noise > epsilon * _FEASIBLE)
    search = search._replace(
        lower=_choose(live & feasible, point, search.lower),
        upper=jnp.where(live & infeasible, point.beta, search.upper),
        bounded=search.bounded | (live & infeasible),
    )

    proposal, satisfied = propose(search, point, s, epsilon)
    # Between neighbouring floats there is nothing left to measure.
    exhausted = (proposal <= search.lower.beta) | (search.bounded & (proposal >= search.upper))
    undecided = ~feasible & ~infeasible
    ended = ~undecided & (satisfied | exhausted | (search.lower.beta >= _top(s)))
    # A poor guess of L leaves a feasible KL but a blurred TV: measure the end once more.
    rounding = 2e-7 * (jnp.abs(search.lower.log_norm) + 0.01)
    blurred = ~repeated & (jnp.abs(search.lower.off) > _BLUR * search.lower.tv + rounding)
    again = undecided | (ended & blurred)
    known = _choose(ended, search.lower, point)
    beta = jnp.where(again, known.beta, proposal)
    done = search.done | (ended & ~blurred)
    return search._replace(
        beta=jnp.where(done, search.beta, beta),
        guess=_extrapolate_norm(s, known, beta),
        done=done,
        used=search.used + live.astype(jnp.int32),
        passes=search.passes + 1,
    )


def _choose(mask: Array, new: Measurement, old: Measurement) -> Measurement:
    return jax.tree.map(lambda n, o: jnp.where(mask, n, o), new, old)


def _top(s: Survey) -> Array:
    """The largest beta that is tried: 1, or just below where p excludes a token of T."""
    return jnp.where(s.one_allowed, 1.0, jnp.float32(_BELOW_ONE))


def _halve(search: Search, point: Measurement, s, epsilon) -> tuple[Array, Array]:
    """The bracket's middle in beta, until [0, 1] was halved so many times."""
    low, high = search.lower.beta, search.upper
    return 0.5 * (low + high), search.bounded & (high - low <= 2.0**-_WAVES)


def _newton(search: Search, point: Measurement, s, epsilon) -> tuple[Array, Array]:
    """The Newton step if it falls inside the bracket, else the bracket's geometric middle."""
    low, high = search.lower.beta, search.upper
    aim = jnp.log(epsilon * _AIM - s.kl_floor)
    excess = point.kl - s.kl_floor
    newton = point.beta * jnp.exp((aim - jnp.log(excess)) * excess / point.variance)
    floor = jnp.where(low > 0, low, 0.5 * _surely_feasible(s, epsilon))
    newton = jnp.maximum(jnp.where(search.bounded, newton, jnp.minimum(newton, high)), floor)

    middle = jnp.sqrt(floor) * jnp.sqrt(high)
    middle = jnp.where((middle > low) & (middle < high), middle, 0.5 * (low + high))
    middle = jnp.where(search.bounded, middle, high)
    inside = (newton > low) & ((newton < high) | ~search.bounded)
    stalled = (search.passes >= _PATIENCE) & (search.passes % 2 == 0)
    satisfied = search.lower.kl >= epsilon * _DONE
    return jnp.where(inside & ~stalled, newton, middle), satisfied


def _surely_feasible(s: Survey, epsilon: Array) -> Array:
    """A lower bound of the root: KL(q || p) - floor <= beta / (1 - beta) KL(p || T)."""
    budget = jnp.maximum(epsilon - s.kl_floor, 0.0)
    return jnp.maximum(budget / (budget + s.kl_pt), 1e-30)


def _read_curve(s: Survey, epsilon: Array) -> tuple[Array, Array, Array]:
    """(start, upper, bounded): where the survey's curve meets epsilon, and what lies above.

    Between its points the curve is read by straight lines in log beta and log KL, left of them by
    slope 2. A point of the curve bounds the search only where it is infeasible beyond doubt.
    """
    grid = jnp.asarray(GRID)
    budget = (epsilon - s.kl_floor)[..., None]
    noise = _CURVE_NOISE * (10 + jnp.abs(s.curve_norm))
    over = s.curve_kl > 1.5 * budget + noise
    bounded = jnp.any(over, axis=-1)
    upper = jnp.where(bounded, grid[jnp.argmax(over, axis=-1)], _top(s))

    known = s.curve_kl > noise
    log_kl = jnp.log(jnp.where(known, s.curve_kl, 1.0))
    log_beta = jnp.broadcast_to(jnp.log(grid), log_kl.shape)
    # The last known point below epsilon, or the first known one if there is none below.
    index = jnp.arange(len(GRID)).reshape((1,) * (log_kl.ndim - 1) + (-1,))
    below = jnp.max(jnp.where(known & (s.curve_kl <= budget), index, -1), axis=-1, keepdims=True)
    at = jnp.where(below >= 0, below, jnp.argmax(known, axis=-1, keepdims=True))
    after = jnp.minimum(at + 1, len(GRID) - 1)
    x0, y0, x1, y1 = (
        jnp.take_along_axis(v, i, axis=-1)[..., 0] for i in (at, after) for v in (log_beta, log_kl)
    )
    slope = jnp.where((below[..., 0] >= 0) & (y1 > y0), (y1 - y0) / (x1 - x0), 2.0)
    start = jnp.exp(x0 + (jnp.log(budget[..., 0]) - y0) / slope)
    start = jnp.where(jnp.any(known, axis=-1), start, _surely_feasible(s, epsilon))
    reaches_top = s.curve_kl[..., -1] <= 1.1 * budget[..., 0] + noise[..., -1]
    start = jnp.where(reaches_top | jnp.isnan(start), _top(s), start)
    return jnp.clip(start, 1e-30, upper), upper, bounded


def _guess_norm(s: Survey, beta: Array, epsilon: Array) -> Array:
    """L(beta) before anything was measured: from the survey's nearest point or from beta -> 0."""
    ratio = beta[..., None] / jnp.asarray(GRID).reshape((1,) * beta.ndim + (-1,))
    nearest = jnp.argmin(jnp.abs(jnp.log(ratio)), axis=-1, keepdims=True)
    ratio, kl, norm = (
        jnp.take_along_axis(v, nearest, axis=-1)[..., 0] for v in (ratio, s.curve_kl, s.curve_norm)
    )
    # beta L' = KL + L, and beta² L'' is about 2 KL.
    taylor = norm + (ratio - 1) * (kl + s.kl_floor + norm) + (ratio - 1) ** 2 * kl
    leftmost = (epsilon - s.kl_floor) - beta * (s.kl_pt - s.kl_floor) - s.kl_floor
    bend = jnp.where(ratio < 0.7, leftmost, taylor)
    # A bend of the size of rounding is none: p = T must give x = 0 exactly.
    return _bounded_norm(s, beta, jnp.where(jnp.abs(bend) < 1e-6, 0.0, bend))


def _extrapolate_norm(s: Survey, point: Measurement, beta: Array) -> Array:
    """L(beta) by Taylor from a measured point."""
    step = beta / point.beta - 1
    # beta L' = KL + L and beta² L'' = Var_q(x).
    taylor = point.log_norm + step * (point.kl + point.log_norm) + 0.5 * step**2 * point.variance
    return _bounded_norm(s, beta, taylor - beta * s.offset)


def _bounded_norm(s: Survey, beta: Array, bend: Array) -> Array:
    """L(beta) from its distance to the chord, which convexity makes negative.

    Within 30 of the chord p^(1-beta) T^beta <= max(p, T) cannot overflow.
    """
    return beta * s.offset + jnp.clip(jnp.where(jnp.isnan(bend), 0.0, bend), -30.0, 0.0)
