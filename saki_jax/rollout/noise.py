"""Gumbel noise from a counter: a pure function of (key, index) in a few fused integer operations.

JAX's own generator moves intermediate arrays on CPU; written out as one expression the same cipher
costs less than half of its accurate mode there (LOG.md).
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, UInt32

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


def threefry(
    key: tuple[UInt32[Array, "..."], UInt32[Array, "..."]],
    counter: tuple[UInt32[Array, "..."], UInt32[Array, "..."]],
) -> tuple[UInt32[Array, "..."], UInt32[Array, "..."]]:
    """Threefry-2x32 with 20 rounds (Salmon et al. 2011): 64 random bits for a key and a counter.

    All four words have one shape.
    """
    schedule = (key[0], key[1], key[0] ^ key[1] ^ jnp.uint32(_PARITY))
    left, right = counter[0] + schedule[0], counter[1] + schedule[1]
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            left = left + right
            right = (right << rotation) | (right >> (32 - rotation))
            right = right ^ left
        left = left + schedule[(group + 1) % 3]
        right = right + schedule[(group + 2) % 3] + jnp.uint32(group + 1)
    return left, right


def gumbel_from_bits(high: UInt32[Array, "*B"], low: UInt32[Array, "*B"]) -> Float[Array, "*B"]:
    """Standard Gumbel numbers -log(-log(1 - w)) from 64 bits each, finite, up to 44.

    w has 31 + 31 bits where it is small: large Gumbel numbers come from small w, and with 24 bits
    they would end near 16, too early to draw a token of probability 1e-7 as often as is its due.
    """
    small = _to_float(high >> 1) * 2.0**-31 + (_to_float(low >> 1) * 2.0**-62 + 2.0**-64)
    # From 1/2 on the low bits could only round w up to 1.
    large = _to_float(high >> 8) * 2.0**-24
    w = jnp.where(high < jnp.uint32(2**31), small, large)
    return -jnp.log(-jnp.log1p(-w))


def _to_float(word: Array) -> Array:
    """A uint32 below 2^31 as float32, by way of int32: CPUs convert no other integer quickly."""
    return word.astype(jnp.int32).astype(jnp.float32)
