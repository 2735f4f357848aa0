"""Largest feasible beta by repeated measurement; the solvers differ in where they look next.

Every solver keeps the same books: a measured feasible point, a measured infeasible one, and the
rows that are done. What is returned was measured, so KL(q || p) <= epsilon is a certificate.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from saki_jax.rollout.bridge_passes import Measurement, Survey, measure

_BELOW_ONE = 1 - 2.0**-24  # the largest float32 below 1
_WAVES = 16  # of the paper's bisection
_MOST_PASSES = 60  # of the certified solver; a guard, seen at work are 10
_TOLERANCE = 4e-5  # a row is done from epsilon (1 - tolerance) on; half of it is aimed at


class Search(NamedTuple):
    """The carry of a solver's loop; [*B] each but for ``passes``."""

    beta: Array  # to be measured next
    guess: Array  # of L there
    lower: Measurement  # best feasible point; beta = 0 until one is found
    upper: Measurement  # nearest infeasible point; beta = the top and kl = inf until one is found
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

    The curve is nearly straight there: slope 2 at the left, flattening to the right.
    """
    top, start = _top(s), _first_beta(s, epsilon)
    return _search(logits_p, logits_t, s, epsilon, start, top, _newton_next, _MOST_PASSES, tile)


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
    return _search(logits_p, logits_t, s, epsilon, top, top, _midpoint, _WAVES + 1, tile)


SOLVERS: dict[str, Callable] = {"newton": certified_newton, "bisect": sixteen_waves}


def _search(logits_p, logits_t, s, epsilon, start, top, propose, most_passes, tile) -> Search:
    zero = jnp.zeros_like(start)
    nowhere = Measurement(zero, zero, zero, zero, zero, jnp.ones_like(s.nonfinite))
    init = Search(
        beta=start,
        guess=_guess_norm(s, start, epsilon),
        lower=nowhere,
        upper=nowhere._replace(beta=top, kl=jnp.full_like(start, jnp.inf)),
        done=s.nonfinite | jnp.broadcast_to(epsilon <= 0, start.shape),
        used=jnp.zeros(start.shape, jnp.int32),
        passes=jnp.int32(0),
    )

    def unfinished(search: Search):
        return (search.passes < most_passes) & ~jnp.all(search.done)

    def one_pass(search: Search) -> Search:
        point = measure(logits_p, logits_t, s, search.beta, search.guess, tile=tile)
        return _record(search, point, s, epsilon, top, propose)

    return lax.while_loop(unfinished, one_pass, init)


def _record(search: Search, point: Measurement, s, epsilon, top, propose) -> Search:
    """Enters a measurement into the books and chooses the next beta of the rows not done."""
    live = ~search.done
    feasible = point.kl <= epsilon
    raises = live & feasible & point.trusted
    lowers = live & ~feasible
    lower = _choose(raises, point, search.lower)
    upper = _choose(lowers, point, search.upper)

    close = lower.kl >= epsilon * (1 - _TOLERANCE)
    at_top = lower.beta >= top
    proposal = propose(search._replace(lower=lower, upper=upper), point, s, epsilon, top)
    # A feasible point whose guess of L was poor is measured again with the L just found.
    again = feasible & ~point.trusted
    beta = jnp.where(again, point.beta, proposal)
    exhausted = ~again & ((beta <= lower.beta) | ((beta >= upper.beta) & (upper.kl < jnp.inf)))
    finished = at_top | (exhausted if propose is _midpoint else close | exhausted)
    return Search(
        beta=jnp.where(live, beta, search.beta),
        guess=_extrapolate_norm(s, point, beta),
        lower=lower,
        upper=upper,
        done=search.done | finished,
        used=search.used + live.astype(jnp.int32),
        passes=search.passes + 1,
    )


def _choose(mask: Array, new: Measurement, old: Measurement) -> Measurement:
    return jax.tree.map(lambda n, o: jnp.where(mask, n, o), new, old)


def _top(s: Survey) -> Array:
    """The largest beta that is tried: 1, or just below where p excludes a token of T."""
    return jnp.where(s.one_allowed, 1.0, jnp.float32(_BELOW_ONE))


def _midpoint(search: Search, point: Measurement, s, epsilon, top) -> Array:
    return 0.5 * (search.lower.beta + search.upper.beta)


def _newton_next(search: Search, point: Measurement, s, epsilon, top) -> Array:
    """The Newton step from ``point`` if it falls inside the bracket, else the bracket's middle."""
    low, high = search.lower.beta, search.upper.beta
    slope = point.variance / point.kl
    aim = jnp.log(epsilon * (1 - _TOLERANCE / 2))
    step = jnp.exp((aim - jnp.log(point.kl)) / slope)
    newton = point.beta * step
    unmeasured = search.upper.kl == jnp.inf
    newton = jnp.where(unmeasured, jnp.minimum(newton, top), newton)
    floor = jnp.where(low > 0, low, 0.5 * _floor(s, epsilon))
    middle = jnp.sqrt(floor) * jnp.sqrt(high)
    middle = jnp.where((middle > low) & (middle < high), middle, 0.5 * (low + high))
    inside = (newton > low) & ((newton < high) | unmeasured)
    return jnp.where(inside, newton, middle)


def _floor(s: Survey, epsilon: Array) -> Array:
    """A beta that is feasible: KL(q_beta || p) <= beta/(1-beta) KL(p || T)."""
    return jnp.maximum(epsilon / (epsilon + s.kl_pt), 1e-30)


def _first_beta(s: Survey, epsilon: Array) -> Array:
    """The top where it is probably feasible, else between the rigorous lower bound and a guess."""
    near_top = s.kl_tp <= 1.2 * epsilon + 2e-6
    low = _floor(s, epsilon)
    high = jnp.sqrt(epsilon / jnp.maximum(s.kl_tp, epsilon))
    start = jnp.where(jnp.isfinite(s.kl_pt), jnp.maximum(low, high), 0.5 * high)
    return jnp.where(near_top, _top(s), jnp.minimum(start, _top(s)))


def _guess_norm(s: Survey, beta: Array, epsilon: Array) -> Array:
    """L(beta) from both ends: convex, 0 at beta = 0, ``offset`` at 1, known slopes.

    Relative to the chord, -beta KL(p||T) + KL(q||p) near 0; kept within 30 of the chord, where
    p^(1-beta) T^beta <= max(p, T) cannot overflow.
    """
    bend = jnp.maximum(-beta * s.kl_pt + epsilon, -(1 - beta) * s.kl_tp)
    bend = jnp.where(jnp.isnan(bend), 0.0, jnp.clip(bend, -30.0, 0.0))
    return beta * s.offset + bend


def _extrapolate_norm(s: Survey, point: Measurement, beta: Array) -> Array:
    """L(beta) by Taylor from a measured point, kept below the chord as convexity demands."""
    ratio = beta / point.beta - 1
    # beta L' = KL + L and beta² L'' = Var_q(x).
    taylor = point.log_norm + ratio * (point.kl + point.log_norm) + 0.5 * ratio**2 * point.variance
    bend = jnp.clip(taylor - beta * s.offset, -30.0, 0.0)
    return jnp.where(jnp.isnan(bend), 0.0, bend) + beta * s.offset
