"""Grouped-query attention, each query over its range of slots: one law, four ways.

Query head h reads key/value head h // (H / G), as in (0, 0, 1, 1). Scores, softmax and sums are
float32. A key that nobody may see may be NaN; a value there is multiplied by exactly 0, so it must
be finite.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from saki_jax.models import splash
from saki_jax.models.blockwise import MASKED, attend_by_length, attend_in_tiles
from saki_jax.models.sharding import per_shard

# Up to this many slots the whole score matrix is cheaper than a loop over parts of it.
FEW_SLOTS = 128
# Up to this many queries a row (decoding, verification) all rows go through the slots together.
FEW_QUERIES = 16
# The kernel for whole sequences of each platform that has one. Without an entry, and for shapes
# that the kernel does not take, the portable way serves; to choose that on a TPU, remove the entry.
KERNELS: dict[str, Callable] = {"tpu": splash.attend_sequences}


class Span(NamedTuple):
    """The slots that a query sees: ``first .. last``, both inclusive; none where last < first."""

    first: jax.Array  # int32 [B or 1, J]
    last: jax.Array  # int32 [B or 1, J]

    def visible(self, slots: int) -> jax.Array:
        """As a mask, bool [B or 1, J, S]."""
        slot = jnp.arange(slots, dtype=jnp.int32)[None, None, :]
        return (self.first[:, :, None] <= slot) & (slot <= self.last[:, :, None])


def attend_span(q: jax.Array, k: jax.Array, v: jax.Array, span: Span) -> jax.Array:
    """Softmax attention of each query over the slots of its span.

    Which way is taken follows from the shapes alone. Memory grows with J + S, not with J * S, and
    the cost with the slots that are seen, in blocks: for few queries with the last slot that any
    row sees, for many with each row's own spans. On a mesh each device works on its own rows and
    heads, without communication.

    Args:
      q: [B, J, H, C].
      k, v: [B, S, G, C].
      span: of each query. A query that sees nothing gets some finite result.

    Returns:
      [B, J, H, C] in q's dtype.
    """
    if k.shape[1] <= FEW_SLOTS:
        return attend(q, k, v, span.visible(k.shape[1]))
    way = attend_by_length if q.shape[1] <= FEW_QUERIES else attend_in_tiles
    return _on_each_device(way, q, k, v, span)


def attend_sequences(q: jax.Array, k: jax.Array, v: jax.Array, span: Span) -> jax.Array:
    """The same for whole sequences, J = S: by the platform's kernel where it has one (`KERNELS`).

    Each query must be the last slot that it sees itself, or see nothing, and ``span.first`` must
    not decrease along a row.
    """
    if not KERNELS or not splash.takes(q):
        return attend_span(q, k, v, span)
    # Decided by the platform that the program is compiled for, which need not be the default one.
    way = partial(jax.lax.platform_dependent, default=attend_in_tiles, **KERNELS)
    return _on_each_device(way, q, k, v, span)


def _on_each_device(
    way: Callable, q: jax.Array, k: jax.Array, v: jax.Array, span: Span
) -> jax.Array:
    first, last = (jnp.broadcast_to(x, q.shape[:2]) for x in span)
    heads, by_row = ("batch", None, "kv_heads", None), ("batch", None)
    # Split by key/value heads: the query heads of a group stay together.
    return per_shard(way, (heads, heads, heads, by_row, by_row), heads)(q, k, v, first, last)


def attend(q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array) -> jax.Array:
    """The same by the whole score matrix.

    Args:
      q: [B, J, H, C].
      k, v: [B, S, G, C].
      visible: bool [B or 1, J, S].

    Returns:
      [B, J, H, C] in q's dtype. A query that sees nothing gets the mean of all values.
    """
    rows, queries, heads, width = q.shape
    groups = k.shape[2]
    # A cache may be wider than the compute dtype (float32 on CPU): the products follow the cache.
    q_grouped = q.reshape(rows, queries, groups, heads // groups, width).astype(k.dtype)
    scores = jnp.einsum("bjgrc,bsgc->bgrjs", q_grouped, k, preferred_element_type=jnp.float32)
    scores = jnp.where(visible[:, None, None], scores * width**-0.5, MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    out = jnp.einsum("bgrjs,bsgc->bjgrc", weights, v)
    return out.reshape(rows, queries, heads, width).astype(q.dtype)
