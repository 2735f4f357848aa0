"""Several sequences one behind the other in a row: where each begins and where a token stands."""

import jax
import jax.numpy as jnp

PADDING = 0  # the segment id of slots that hold no token


def segment_starts(segment_ids: jax.Array) -> jax.Array:
    """The column where each token's segment begins.

    A segment is a run of equal ids; a run of `PADDING` is one as well. Causal attention inside
    segments is then: column j sees the columns ``starts[j] .. j``.

    Args:
      segment_ids: int [B, J].

    Returns:
      int32 [B, J], not decreasing along a row.
    """
    column = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)[None, :]
    before = jnp.pad(segment_ids[:, :-1], ((0, 0), (1, 0)), constant_values=PADDING)
    begins = (segment_ids != before) & (column > 0)
    return jax.lax.cummax(jnp.where(begins, column, 0), axis=1)
