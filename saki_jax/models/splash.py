"""Causal attention inside sequences by JAX's splash kernel: whole sequences on a TPU.

The kernel applies a causal mask and segment ids. Its own tables of blocks know the causal mask
alone, so that the cost of a packed line would follow the square of its width. The tables made here
know the segments as well: a block of queries runs from the block where its first segment begins.
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import BlockSizes, SegmentIds
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo

LANES = 128  # of the vector unit: blocks are a multiple
BLOCK_LIMIT = 512  # queries, and slots, of a block at most
SEES_NOTHING = -1  # the segment id of padding


def takes(q: jax.Array) -> bool:
    """Whether the kernel computes such queries [B, J, H, C]; compiled for heads of 64 and 128."""
    return q.shape[1] > LANES and q.shape[3] % 64 == 0


def attend_sequences(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    first: jax.Array,
    last: jax.Array,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Each token over its own sequence up to itself; as `blockwise.attend_in_tiles`.

    Row by row; blocks in which nothing is visible are neither computed nor read, forward and
    backward. The scale C**-0.5 goes into the queries, rounded to their dtype.

    Args:
      q: [B, J, H, C], of a shape that `takes` accepts.
      k, v: [B, J, G, C].
      first: int32 [B, J], the slot where the query's sequence begins, not decreasing along a row
        (`segments.segment_starts`).
      last: int32 [B, J], the query's own slot; less than ``first`` for padding, which gets 0 and
        gives no gradient.
      interpret: run the kernel step by step with ordinary operations, on any backend.

    Returns:
      [B, J, H, C] in q's dtype.
    """
    length = q.shape[1]
    block = _block(length)
    extra = -length % block
    some = last >= first
    segment = jnp.pad(
        jnp.where(some, first, SEES_NOTHING), ((0, 0), (0, extra)), constant_values=SEES_NOTHING
    )

    def heads_first(x: jax.Array) -> jax.Array:
        return jnp.pad(jnp.swapaxes(x, 1, 2), ((0, 0), (0, 0), (0, extra), (0, 0)))

    def one_row(row: tuple) -> jax.Array:
        q, k, v, segment = row
        return _kernel(segment, block, interpret)(q, k, v, SegmentIds(segment, segment))

    scaled = (q.astype(jnp.float32) * q.shape[3] ** -0.5).astype(q.dtype)
    out = jax.lax.map(one_row, (*(heads_first(x) for x in (scaled, k, v)), segment))
    out = jnp.swapaxes(out, 1, 2)[:, :length]
    return jnp.where(some[:, :, None, None], out, jnp.zeros((), out.dtype))


def _kernel(segment: jax.Array, block: int, interpret: bool) -> kernels.SplashAttentionKernel:
    """The kernel for a row with these segment ids [J], J a multiple of the block."""
    by_queries, by_slots = _blocks_seen(segment, block)
    # One size for all passes: what padding sees depends on the blocks that run, and the backward
    # pass must see the same.
    sizes = BlockSizes(*[block] * 8)
    return kernels.SplashAttentionKernel(
        fwd_mask_info=by_queries,
        dq_mask_info=by_queries,
        dkv_mask_info=by_slots,
        block_sizes=sizes,
        is_mqa=False,
        save_residuals=False,
        mask_value=kernels.DEFAULT_MASK_VALUE,
        attn_logits_soft_cap=None,
        residual_checkpoint_name=None,
        mask_function=_causal,
        interpret=interpret,
    )


def _blocks_seen(segment: jax.Array, block: int) -> tuple[MaskInfo, MaskInfo]:
    """Which pairs (block of queries i, block of slots j) run, as the kernel's tables [1, n, n].

    The slots of i run from low[i] to i, the queries of j from j to high[j]. The table of what to
    read next (slots in the first result, queries in the second) names a block that runs even where
    none does, so that nothing else is read. Padding starts at itself: it always sees itself, as the
    kernel divides by what a query sees.
    """
    slots = jnp.arange(segment.shape[0], dtype=jnp.int32)
    begins = jnp.where(segment == SEES_NOTHING, slots, segment)  # not decreasing
    low = begins[::block, None] // block  # [n, 1]
    row = jnp.arange(low.shape[0], dtype=jnp.int32)[:, None]
    column = row.T
    run = (low <= column) & (column <= row)
    high = jnp.sum(low <= column, axis=0, keepdims=True, dtype=jnp.int32) - 1  # [1, n]

    def table(read_next: jax.Array) -> MaskInfo:
        return MaskInfo(
            data_next=read_next[None],
            mask_next=None,
            block_mask=run.astype(jnp.int32)[None],
            partial_mask_blocks=None,
            q_sequence=slots,
        )

    return table(jnp.clip(column, low, row)), table(jnp.clip(row, column, high))


def _causal(query: jax.Array, slot: jax.Array) -> jax.Array:
    return query >= slot


def _block(length: int) -> int:
    """The size of blocks that cover the length with little left over."""
    blocks = -(-length // BLOCK_LIMIT)
    return -(-length // (LANES * blocks)) * LANES
