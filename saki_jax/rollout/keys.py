"""Random numbers named by what they are for, never by where they are computed.

A draw belongs to (run seed, training step, sequence, response position, purpose). Neither the slot
of a row, nor the wave, the block size, the device or the neighbours enter, so the committed
trajectory is the same function of the noise for every schedule of the engine.
"""

from enum import IntEnum

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt32

from saki_jax.rollout.noise import gumbel_from_bits, threefry

GENERATOR = "threefry2x32"  # named, so that a trajectory does not depend on a JAX default
_UNIFORM_BITS = 24  # the width of a float32 significand


class Purpose(IntEnum):
    """What a draw is for; a key shared by two purposes keeps every formula and breaks the law."""

    DRAFT = 0  # the student's proposal
    ACCEPT = 1  # the uniform of the acceptance test
    RESIDUAL = 2  # the correction
    TEACHER_SAMPLE = 3  # a draw from T at a correction
    PLACEMENT = 4  # which positions a control method supervises
    EVALUATION = 5  # sampling outside training


def step_key(seed: int, step: Int[Array, ""] | int) -> jax.Array:
    """The key of one training step of a run."""
    return jax.random.fold_in(jax.random.key(seed, impl=GENERATOR), step)


def position_keys(
    key: jax.Array, sequence_id: Int[Array, "*B"], position: Int[Array, "*B"], purpose: Purpose
) -> jax.Array:
    """One key for each (sequence, absolute response position), for one purpose.

    Args:
      key: the step's key, a typed scalar key.
      sequence_id: global name of the row within the step.
      position: response position of the token drawn, counted from 0.
      purpose: what is drawn; a static value.

    Returns:
      Typed keys [*B].
    """
    key = jax.random.fold_in(key, int(purpose))
    rows = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, sequence_id.reshape(-1))
    keys = jax.vmap(jax.random.fold_in)(rows, position.reshape(-1))
    return keys.reshape(sequence_id.shape)


def gumbel(keys: jax.Array, vocab_size: int) -> Float[Array, "*B V"]:
    """Standard Gumbel noise, ``vocab_size`` independent values for each key of [*B].

    Value v is a function of the key and of v alone, so any part of the vocabulary can be computed
    where it is needed. The noise reaches beyond 40 (noise.py); JAX's default ends at 15.94 and
    misses most of a tail that is spread over many tokens.

    Raises:
      ValueError: the keys are not of the generator that `step_key` names.
    """
    shape = (*keys.shape, vocab_size)
    return _gumbel(keys, lax.broadcasted_iota(jnp.uint32, shape, len(shape) - 1))


def gumbel_at(keys: jax.Array, ids: Int[Array, "W"]) -> Float[Array, "*B W"]:
    """The values of `gumbel` at these ids alone; bit for bit the same."""
    shape = (*keys.shape, ids.shape[0])
    return _gumbel(keys, lax.broadcast_in_dim(ids.astype(jnp.uint32), shape, (len(shape) - 1,)))


def _gumbel(keys: jax.Array, index: UInt32[Array, "*B W"]) -> Float[Array, "*B W"]:
    if keys.dtype != jax.random.key(0, impl=GENERATOR).dtype:
        raise ValueError(f"keys must be {GENERATOR} keys as made by step_key, got {keys.dtype}")
    words = jax.random.key_data(keys)[..., None]  # [*B, 2, 1]
    key = tuple(jnp.broadcast_to(words[..., i, :], index.shape) for i in range(2))
    return gumbel_from_bits(*threefry(key, (index, jnp.zeros_like(index))))


def uniform(keys: jax.Array) -> Float[Array, "*B"]:
    """One uniform number in [0, 1) for each key of [*B]: 24 bits, can be 0, is never 1.

    A full 32-bit integer scaled in float32 would round up to 1 for the top 128 values.
    """
    bits = jax.vmap(lambda k: jax.random.bits(k, (), jnp.uint32))(keys.reshape(-1))
    scaled = (bits >> (32 - _UNIFORM_BITS)).astype(jnp.float32) * 2.0**-_UNIFORM_BITS
    return scaled.reshape(keys.shape)
