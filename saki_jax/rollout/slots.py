"""The slots of a rollout: which rows are being generated, how far they are, and the one place where
tokens become committed."""

from typing import NamedTuple, no_type_check

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int


@no_type_check
@struct.dataclass
class Slots:
    """W rows in generation. Both caches hold every committed token of a row but the last.

    A slot that is not alive computes along; nothing of it is ever committed.
    """

    row: Int[Array, "W"]  # row of the batch served now or last; B (one past the end) before any
    sequence_id: Int[Array, "W"]  # names the row's randomness
    length: Int[Array, "W"]  # cache slot of the pending token
    pending: Int[Array, "W"]  # the last committed token, not yet fed to a model
    count: Int[Array, "W"]  # committed response tokens
    alive: Bool[Array, "W"]
    finished: Bool[Array, "W"]  # an end token was committed
    nonfinite: Bool[Array, "W"]  # stopped because a model emitted NaN or nothing but -inf

    @property
    def start(self) -> Int[Array, "W"]:
        """Where the pending token is fed: ``length``, and 0 in slots without a live row, which then
        never make attention read further than the live rows need."""
        return jnp.where(self.alive, self.length, 0)


class Block(NamedTuple):
    """K positions of W rows that a wave offers for commitment."""

    events: dict[str, Array]  # fields of `Rollout`, [W, K] each; "tokens" among them
    usable: Int[Array, "W"]  # positions up to and including the first correction, 1..K
    nonfinite: Bool[Array, "W K"]  # positions whose distribution cannot be trusted


def empty_slots(slots: int, rows: int) -> Slots:
    """W free slots for a batch of ``rows`` rows."""
    zero, no = jnp.zeros(slots, jnp.int32), jnp.zeros(slots, bool)
    return Slots(
        row=jnp.full(slots, rows, jnp.int32),
        sequence_id=zero,
        length=zero,
        pending=zero,
        count=zero,
        alive=no,
        finished=no,
        nonfinite=no,
    )


def commit(
    slots: Slots, block: Block, *, response_length: int, end_ids: tuple[int, ...]
) -> tuple[Slots, Int[Array, "W"]]:
    """Advances the rows by what may be kept of a block; the only place that cuts a response.

    Kept are the positions up to the first of: the first correction, the first end token (both
    inclusive), the length cap, and a position without a trustworthy distribution (exclusive). What
    stands behind is dropped here and nowhere else: rolling the caches back is not advancing
    ``length`` over it.

    Returns:
      the slots after the block, and how many of its positions were kept, 0 for free slots.
    """
    tokens = block.events["tokens"]
    block_size = tokens.shape[1]
    offset = jnp.arange(block_size, dtype=jnp.int32)[None, :]

    limit = jnp.minimum(block.usable, response_length - slots.count)
    inside = offset < limit[:, None]
    first_end = _first(_is_any(tokens, end_ids) & inside)
    first_bad = _first(block.nonfinite & inside)
    # A bad position has no token at all, so it goes before an end token "found" there.
    nonfinite = slots.alive & (first_bad < block_size) & (first_bad <= first_end)
    finished = slots.alive & (first_end < first_bad)
    kept = jnp.minimum(limit, jnp.minimum(first_end + 1, first_bad))
    kept = jnp.where(slots.alive, kept, 0)

    count = slots.count + kept
    last = jnp.take_along_axis(tokens, jnp.maximum(kept - 1, 0)[:, None], axis=1)[:, 0]
    advanced = slots.replace(
        length=slots.length + kept,
        pending=jnp.where(kept > 0, last, slots.pending),
        count=count,
        alive=slots.alive & ~finished & ~nonfinite & (count < response_length),
        finished=slots.finished | finished,
        nonfinite=slots.nonfinite | nonfinite,
    )
    return advanced, kept


def record(
    table: dict[str, Array], block: Block, slots: Slots, kept: Int[Array, "W"]
) -> dict[str, Array]:
    """Writes the kept positions of a block into the batch's [B, T] arrays.

    Args:
      table: fields of `Rollout`, [B, T] each.
      block: the wave's offer.
      slots: the rows *before* the block was committed.
      kept: positions kept of each row.
    """
    offset = jnp.arange(block.nonfinite.shape[1], dtype=jnp.int32)[None, :]

    def write(field: Array, values: Array) -> Array:
        # What is not kept goes to column T, where writes are dropped.
        column = jnp.where(offset < kept[:, None], slots.count[:, None] + offset, field.shape[1])
        return field.at[slots.row[:, None], column].set(values.astype(field.dtype), mode="drop")

    return {name: write(table[name], values) for name, values in block.events.items()}


def _first(flags: Bool[Array, "W K"]) -> Int[Array, "W"]:
    """Index of the first True of each row, K where there is none."""
    index = jnp.argmax(flags, axis=1).astype(jnp.int32)
    return jnp.where(flags.any(axis=1), index, flags.shape[1])


def _is_any(tokens: Int[Array, "W K"], ids: tuple[int, ...]) -> Bool[Array, "W K"]:
    hit = jnp.zeros(tokens.shape, bool)
    for token in ids:
        hit |= tokens == token
    return hit
