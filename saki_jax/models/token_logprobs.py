"""Log-probabilities of given tokens without ever holding [B, T, V]."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def token_logprobs(
    logits_fn: Callable[[jax.Array], jax.Array],
    hidden: jax.Array,
    targets: jax.Array,
    *,
    wanted: jax.Array | None = None,
    chunk: int = 512,
) -> tuple[jax.Array, jax.Array]:
    """log softmax at the targets, and the entropy, of every wanted position, a chunk at a time.

    The logits of a chunk are computed again in the backward pass. Everything is reduced in float32.

    Args:
      logits_fn: hidden [*B, D] -> logits [*B, V]; may close over traced parameters.
      hidden: [B, T, D].
      targets: int [B, T, n]. Ids outside [0, V) are allowed where the caller masks the result:
        there it is the finite log-probability of some other token, with a finite gradient.
      wanted: bool [B, T]; None for all. The rest costs nothing, and its results are 0.
      chunk: (row, position) pairs whose logits may be alive together; at least one position of
        every row is.

    Returns:
      log-probabilities float32 [B, T, n], differentiable; entropy in nats float32 [B, T], a
      measurement without gradient.
    """
    if wanted is None:
        wanted = jnp.ones(hidden.shape[:2], bool)
    return map_positions(
        lambda part: _gather(logits_fn(part[0]), part[1]), (hidden, targets), wanted, chunk=chunk
    )


def map_positions(
    function: Callable[[Any], Any], arrays: Any, wanted: jax.Array, *, chunk: int
) -> Any:
    """A function of single positions at all that are wanted, a chunk at a time, 0 elsewhere.

    The wanted positions of each row move together to its front; then slices of the time axis are
    walked through, all rows at once (rows may lie on different devices). Slices in which no row
    has a wanted position are skipped. Inside a slice the function is computed again in the backward
    pass.

    Args:
      function: tree of [B, n, *x] -> tree of [B, n, *y], each position by itself; what it makes of
        positions that are not wanted must be finite to differentiate through.
      arrays: tree of [B, T, *x].
      wanted: bool [B, T].
      chunk: (row, position) pairs given to the function at once; at least one of every row.

    Returns:
      Tree of [B, T, *y].
    """
    rows, length = wanted.shape
    width = min(max(chunk // rows, 1), length)
    steps = -(-length // width)
    order = jnp.argsort(~wanted, axis=1, stable=True)
    longest = wanted.sum(axis=1).max()

    def slices(x: jax.Array) -> jax.Array:
        """[B, T, *x] -> [steps, B, width, *x], in the order of the walk, zeros behind T."""
        x = _at(x, order)
        x = jnp.pad(x, ((0, 0), (0, steps * width - length), *[(0, 0)] * (x.ndim - 2)))
        return jnp.moveaxis(x.reshape(rows, steps, width, *x.shape[2:]), 1, 0)

    @jax.checkpoint
    def one(begin: jax.Array, part: Any) -> Any:
        nothing = jax.tree.map(
            lambda y: jnp.zeros(y.shape, y.dtype), jax.eval_shape(function, part)
        )
        return jax.lax.cond(begin < longest, function, lambda _: nothing, part)

    begins = jnp.arange(steps) * width
    found = jax.lax.map(lambda step: one(*step), (begins, jax.tree.map(slices, arrays)))
    place = jnp.maximum(jnp.cumsum(wanted, axis=1) - 1, 0)  # of each wanted position in the walk

    def joined(y: jax.Array) -> jax.Array:
        """[steps, B, width, *y] -> [B, T, *y]."""
        y = jnp.moveaxis(y, 0, 1).reshape(rows, steps * width, *y.shape[3:])
        return jnp.where(_widened(wanted, y.ndim), _at(y, place), jnp.zeros((), y.dtype))

    return jax.tree.map(joined, found)


def _at(x: jax.Array, index: jax.Array) -> jax.Array:
    """x [B, T, *x] at the positions index [B, n]."""
    return jnp.take_along_axis(x, _widened(index, x.ndim), axis=1)


def _widened(x: jax.Array, ndim: int) -> jax.Array:
    return x.reshape(*x.shape, *(1,) * (ndim - x.ndim))


def _gather(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """logits [*B, V], targets [*B, n] -> log-probabilities [*B, n], entropy [*B]."""
    logits = logits.astype(jnp.float32)
    log_z = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    # take_along_axis gives NaN outside the range, and a masked NaN still spoils the gradient.
    inside = jnp.clip(targets, 0, logits.shape[-1] - 1)
    picked = jnp.take_along_axis(logits, inside, axis=-1) - log_z
    frozen = jax.lax.stop_gradient(logits - log_z)
    terms = jnp.exp(frozen) * jnp.where(frozen > -jnp.inf, frozen, 0.0)  # 0 log 0 = 0
    return picked, -jnp.sum(terms, axis=-1)
