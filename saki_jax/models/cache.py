"""Key/value caches: a pair of arrays per layer, written in place at ragged positions."""

import jax
import jax.numpy as jnp

from saki_jax.models.config import Qwen3Config
from saki_jax.models.sharding import constrain

LayerCache = tuple[jax.Array, jax.Array]  # keys and values, [B, S, G, C] each


def cache_dtype(compute_dtype: jnp.dtype) -> jnp.dtype:
    """float32 on CPU, where a bfloat16 scatter rewrites the whole cache; else the compute dtype."""
    return jnp.dtype(jnp.float32 if jax.default_backend() == "cpu" else compute_dtype)


def init_cache(
    config: Qwen3Config, rows: int, slots: int, dtype: jnp.dtype
) -> tuple[LayerCache, ...]:
    """Empty caches of S slots a row. Arrays stay apart per layer: writes are then in place."""
    shape = (rows, slots, config.num_kv_heads, config.head_dim)

    def empty() -> jax.Array:
        return constrain(jnp.zeros(shape, dtype), "batch", None, "kv_heads", None)

    return tuple((empty(), empty()) for _ in range(config.num_layers))


def write(layer: LayerCache, k: jax.Array, v: jax.Array, start: jax.Array) -> LayerCache:
    """Puts J new keys and values of row b into the slots start[b] .. start[b] + J - 1.

    What would fall behind the last slot is dropped. (dynamic_update_slice would move the block
    back and overwrite valid slots there.)

    Args:
      layer: the layer's cache.
      k: [B, J, G, C].
      v: [B, J, G, C].
      start: int [B].
    """
    slots = start[:, None] + jnp.arange(k.shape[1])[None, :]

    def one_row(row: jax.Array, new: jax.Array, at: jax.Array) -> jax.Array:
        return row.at[at].set(new, mode="drop", unique_indices=True, indices_are_sorted=True)

    keys, values = layer
    put = jax.vmap(one_row)
    return put(keys, k.astype(keys.dtype), slots), put(values, v.astype(values.dtype), slots)
