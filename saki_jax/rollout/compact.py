"""The end of a batch: the last live rows move into fewer slots, so that a wave costs less."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from saki_jax.rollout.resident import Resident
from saki_jax.rollout.slots import Slots


def compact(state: Resident, size: int) -> Resident:
    """Gathers the live rows, at most ``size``, into a state of so many slots.

    Nothing may wait any more, and every row must have been harvested. The old caches are given
    back one array after the other, so that no second set of them is ever held; the stash goes.
    """
    rows, slots = _live_first(state.slots, size)
    slots = jax.tree.map(_laid_out_as, slots, state.slots)
    leaves, tree = jax.tree.flatten(state.caches)
    moved = []
    for leaf in leaves:
        moved.append(_laid_out_as(_take(leaf, rows), leaf))
        leaf.delete()
    caches = jax.tree.unflatten(tree, moved)
    return state.replace(caches=caches, slots=slots, stash=state.stash.replace(caches=()))


def _laid_out_as(new: Array, old: Array) -> Array:
    """Laid out as before; the compiler alone might put all rows on every device."""
    return new if new.sharding == old.sharding else jax.device_put(new, old.sharding)


@functools.partial(jax.jit, static_argnames="size")
def _live_first(slots: Slots, size: int) -> tuple[Int[Array, "n"], Slots]:
    rows = jnp.argsort(~slots.alive, stable=True)[:size]
    return rows, jax.tree.map(lambda x: x[rows], slots)


@jax.jit
def _take(leaf: Any, rows: Int[Array, "n"]) -> Any:
    return leaf[rows]
