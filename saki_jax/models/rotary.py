"""Rotary positions (RoPE), half-split pairing."""

import jax
import jax.numpy as jnp
import numpy as np


def rotary_tables(positions: jax.Array, head_dim: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """cos and sin of position times frequency, [*B, C/2] each, float32 whatever the model's dtype.

    Frequencies or positions rounded to bfloat16 are wrong by up to 1.2 in the cosine at position
    4,095. The frequencies are rounded once, from float64.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    frequencies = jnp.asarray(theta**-exponents, jnp.float32)
    frequencies = frequencies.reshape((1,) * positions.ndim + (-1,))
    angles = positions.astype(jnp.float32)[..., None] * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the pairs (x_i, x_{i+C/2}) of x [*B, heads, C] by the tables [*B, C/2]."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)
