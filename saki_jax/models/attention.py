"""Grouped-query attention over masked slots."""

import jax
import jax.numpy as jnp

# Finite, so that a row without any visible slot is a plain average and never NaN.
MASKED = -1e30


def attend(q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array) -> jax.Array:
    """Softmax attention; query head h reads key/value head h // (H / G), as in (0, 0, 1, 1).

    Args:
      q: [B, J, H, C].
      k: [B, S, G, C]. A key in a slot that is not visible may be NaN: its score is replaced before
        the softmax.
      v: [B, S, G, C]. A value in such a slot is multiplied by exactly 0, so it must be finite.
      visible: bool [B or 1, J, S].

    Returns:
      [B, J, H, C] in q's dtype. Scores and softmax are float32.
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
