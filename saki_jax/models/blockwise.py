"""Attention over blocks of slots with an online softmax: no array of queries times slots.

Both functions here read only the blocks that somebody may see; the numbers of blocks are known
when the program runs, not when it is compiled. The softmax of a query is put together block by
block from (top, total, sum): the largest score so far, and the sums of exp(score - top) and of
exp(score - top) * value (Milakov & Gimelshein 2018; Dao et al. 2022). Blocks lie at fixed slots, so
a query's result does not depend on what else is computed with it: a block of which it sees nothing
changes nothing, to the bit.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

# Finite, so that a query without any visible slot is finite and never NaN.
MASKED = -1e30


def length_block() -> int:
    """Slots read together by `attend_by_length`; accelerators pay more for a turn of the loop."""
    return 128 if jax.default_backend() == "cpu" else 512


def tile_limit() -> int:
    """Queries, and slots, of a tile of `attend_in_tiles` at most."""
    return 128 if jax.default_backend() == "cpu" else 256


def attend_by_length(
    q: jax.Array, k: jax.Array, v: jax.Array, first: jax.Array, last: jax.Array
) -> jax.Array:
    """All queries of all rows together, block after block up to the last slot that any row sees.

    For decoding and verification: J is small, S is the capacity of a cache, and ``max(last)`` is
    how much of it is in use. The cache is read in place.

    Args:
      q: [B, J, H, C].
      k, v: [B, S, G, C].
      first, last: int [B, J], the slots that a query sees, both inclusive.
    """
    rows, queries, _, width = q.shape
    slots, groups = k.shape[1:3]
    block = min(length_block(), slots)
    grouped = q.reshape(rows, queries, groups, -1, width).astype(k.dtype)
    needed = jnp.clip(last.max() + 1, 0, slots)

    def step(i: jax.Array, softmax: tuple) -> tuple:
        at, slot = _block_at(i, block, slots)
        seen = _seen(slot, i * block, first, last)[:, None, None]
        scores = jnp.einsum(
            "bjgrc,bsgc->bgrjs", grouped, _part(k, at, block), preferred_element_type=jnp.float32
        )
        values = partial(jnp.einsum, "bgrjs,bsgc->bgrjc", preferred_element_type=jnp.float32)
        return _absorb(softmax, scores * width**-0.5, seen, _part(v, at, block), values)

    softmax = _nothing((rows, groups, q.shape[2] // groups, queries), width)
    softmax = jax.lax.fori_loop(0, -(-needed // block), step, softmax)
    out, _ = _finish(softmax)  # [B, G, R, J, C]
    return jnp.moveaxis(out, 3, 1).reshape(q.shape).astype(q.dtype)


def attend_in_tiles(
    q: jax.Array, k: jax.Array, v: jax.Array, first: jax.Array, last: jax.Array
) -> jax.Array:
    """Row by row in tiles of queries times slots; tiles in which nothing is visible are skipped.

    For whole sequences: training, scoring, prefill. The backward pass keeps the result and the
    log-sum-exp of each query and computes the scores again, tile by tile. A query that sees nothing
    gets 0.

    Args: as `attend_by_length`.
    """
    tile = _even_tile(q.shape[1])
    extra = -q.shape[1] % tile
    padded = jnp.pad(q, ((0, 0), (0, extra), (0, 0), (0, 0)))
    nothing = {"constant_values": -1}
    first = jnp.pad(first, ((0, 0), (0, extra)))
    last = jnp.pad(last, ((0, 0), (0, extra)), **nothing)
    return _tiled(padded, k, v, first, last, tile)[:, : q.shape[1]]


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def _tiled(q, k, v, first, last, tile):
    return _tiled_forward(q, k, v, first, last, tile)[0]


def _tiled_forward(q, k, v, first, last, tile):
    """The result [B, J, H, C], and what the backward pass needs."""
    groups = k.shape[2]

    def one_row(row: tuple) -> tuple:
        q, k, v, first, last = row
        q = q.reshape(q.shape[0], groups, -1, q.shape[-1]).astype(k.dtype)  # [J, G, R, C]
        width = q.shape[-1]
        values = partial(jnp.einsum, "grjs,sgc->grjc", preferred_element_type=jnp.float32)

        def queries(start: jax.Array) -> tuple:
            q_, first_, last_ = (_part(x, start, tile, 0) for x in (q, first, last))

            def step(i: jax.Array, softmax: tuple) -> tuple:
                scores, seen, at, block = _tile_scores(i, q_, k, first_, last_)
                return _absorb(softmax, scores, seen, _part(v, at, block, 0), values)

            softmax = _nothing((groups, q.shape[2], tile), width)
            softmax = jax.lax.fori_loop(*_blocks_seen(first_, last_, k.shape[0]), step, softmax)
            out, log_sum = _finish(softmax)
            return jnp.moveaxis(out, 2, 0), log_sum  # [tile, G, R, C], [G, R, tile]

        out, log_sum = jax.lax.map(queries, jnp.arange(0, q.shape[0], tile))
        return out.reshape(q.shape[0], -1, width), log_sum

    out, log_sum = jax.lax.map(one_row, (q, k, v, first, last))
    out = out.astype(q.dtype)
    return out, (q, k, v, first, last, out, log_sum)


def _tiled_backward(tile, kept, d_out):
    """Gradients of q, k and v: the tiles of the forward pass once more, five products each."""
    groups = kept[1].shape[2]

    def one_row(row: tuple) -> tuple:
        q, k, v, first, last, out, log_sum, d_out = row
        shape = (q.shape[0], groups, -1, q.shape[-1])
        scale = q.shape[-1] ** -0.5
        # The part of the softmax's gradient that is common to all slots of a query, [J, G, R].
        common = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), -1)
        q, d_out = (x.reshape(shape).astype(k.dtype) for x in (q, d_out))
        common = common.reshape((*shape[:2], -1))

        def queries(sums: tuple, part: tuple) -> tuple:
            start, log_sum_ = part
            mine = (_part(x, start, tile, 0) for x in (q, first, last, d_out, common))
            q_, first_, last_, d_out_, common_ = mine
            common_ = jnp.moveaxis(common_, 0, 2)[..., None]  # [G, R, tile, 1]

            def step(i: jax.Array, sums: tuple) -> tuple:
                d_q, d_k, d_v = sums
                scores, seen, at, block = _tile_scores(i, q_, k, first_, last_)
                weights = jnp.where(seen, jnp.exp(scores - log_sum_[..., None]), 0.0)
                k_, v_ = _part(k, at, block, 0), _part(v, at, block, 0)
                d_weights = _product("jgrc,sgc->grjs", d_out_, v_)
                d_scores = (weights * (d_weights - common_) * scale).astype(k.dtype)
                d_q += _product("grjs,sgc->jgrc", d_scores, k_)
                d_k = _add(d_k, at, _product("grjs,jgrc->sgc", d_scores, q_))
                d_v = _add(d_v, at, _product("grjs,jgrc->sgc", weights.astype(v.dtype), d_out_))
                return d_q, d_k, d_v

            start = (jnp.zeros(q_.shape, jnp.float32), *sums)
            bounds = _blocks_seen(first_, last_, k.shape[0])
            d_q, *sums = jax.lax.fori_loop(*bounds, step, start)
            return tuple(sums), d_q

        zeros = jnp.zeros(k.shape, jnp.float32)
        starts = jnp.arange(0, q.shape[0], tile)
        (d_k, d_v), d_q = jax.lax.scan(queries, (zeros, zeros), (starts, log_sum))
        return d_q.reshape(d_q.shape[0] * tile, -1, q.shape[-1]), d_k, d_v

    d_q, d_k, d_v = jax.lax.map(one_row, (*kept, d_out))
    q, k, v = kept[:3]
    return d_q.astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype), None, None


_tiled.defvjp(_tiled_forward, _tiled_backward)

_product = partial(jnp.einsum, preferred_element_type=jnp.float32)


def _tile_scores(i: jax.Array, q, k, first, last) -> tuple:
    """Scores [G, R, J, S] of one tile, which of them count, and where its slots lie."""
    slots = k.shape[0]
    block = _even_tile(slots)
    at, slot = _block_at(i, block, slots)
    scores = _product("jgrc,sgc->grjs", q, _part(k, at, block, 0)) * q.shape[-1] ** -0.5
    seen = _seen(slot, i * block, first[None], last[None])[0]
    return scores, seen[None, None], at, block


def _blocks_seen(first: jax.Array, last: jax.Array, slots: int) -> tuple[jax.Array, jax.Array]:
    """The range of blocks in which any of these queries sees a slot; empty where none does."""
    block = _even_tile(slots)
    some = last >= first
    low = jnp.where(some, first, slots).min()
    high = jnp.minimum(jnp.where(some, last, -1).max(), slots - 1)
    return low // block, high // block + 1


def _even_tile(length: int) -> int:
    """The size of tiles that cover the length with little left over; a multiple of 8."""
    tiles = -(-length // tile_limit())
    return min(-(-length // (8 * tiles)) * 8, length)


def _block_at(i: jax.Array, block: int, slots: int) -> tuple[jax.Array, jax.Array]:
    """Where block i begins, and its slots. The last block is moved back to end with the slots."""
    at = jnp.minimum(i * block, slots - block)
    return at, at + jnp.arange(block, dtype=jnp.int32)


def _seen(slot: jax.Array, from_slot: jax.Array, first: jax.Array, last: jax.Array) -> jax.Array:
    """[*B, S]: the slots that queries [*B] see, without those that an earlier block has."""
    slot = slot.reshape((1,) * first.ndim + (-1,))
    return (first[..., None] <= slot) & (slot <= last[..., None]) & (slot >= from_slot)


def _part(x: jax.Array, at: jax.Array, size: int, axis: int = 1) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, at, size, axis)


def _add(total: jax.Array, at: jax.Array, part: jax.Array) -> jax.Array:
    """Adds a part into the rows from ``at`` on, in place."""
    old = _part(total, at, part.shape[0], 0)
    return jax.lax.dynamic_update_slice_in_dim(total, old + part, at, 0)


def _nothing(shape: tuple[int, ...], width: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The softmax over no slot."""
    zero = jnp.zeros(shape, jnp.float32)
    return jnp.full(shape, MASKED), zero, jnp.zeros((*shape, width), jnp.float32)


def _absorb(
    softmax: tuple, scores: jax.Array, seen: jax.Array, v: jax.Array, values: Callable
) -> tuple:
    """The softmax over the slots so far and those of one more block."""
    top, total, out = softmax
    scores = jnp.where(seen, scores, MASKED)  # before anything else: a score may be NaN
    new_top = jnp.maximum(top, scores.max(axis=-1))
    shrink = jnp.exp(top - new_top)
    # Masked again: where a query has seen nothing yet, exp(MASKED - MASKED) is 1.
    weights = jnp.where(seen, jnp.exp(scores - new_top[..., None]), 0.0)
    total = total * shrink + weights.sum(axis=-1)
    return new_top, total, out * shrink[..., None] + values(weights.astype(v.dtype), v)


def _finish(softmax: tuple) -> tuple[jax.Array, jax.Array]:
    """The mean value of each query, 0 where it saw nothing, and the log of its sum of exp."""
    top, total, out = softmax
    total = jnp.where(total > 0, total, 1.0)
    return out / total[..., None], top + jnp.log(total)
