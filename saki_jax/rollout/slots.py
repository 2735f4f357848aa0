"""The slots of a rollout: which rows are being generated, how far they are, and the one place where
tokens become committed."""

from typing import Any, NamedTuple, no_type_check

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int

from saki_jax.models.lm import LanguageModel
from saki_jax.models.sharding import constrain
from saki_jax.rollout.batch import Prompts


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


def admit(
    models: tuple[LanguageModel, ...],
    params: tuple[Any, ...],
    caches: tuple[Any, ...],
    slots: Slots,
    prompts: Prompts,
    next_row: Int[Array, ""],
    num_rows: Int[Array, ""],
    refill_rows: int,
) -> tuple[tuple[Any, ...], Slots, Int[Array, ""]]:
    """Prefills the next R prompts and puts them into free slots (at least R must be free).

    Rows beyond ``num_rows`` pad the batch for the devices and are never admitted. A prompt's last
    token stays pending, so a prefill needs no logits.

    Returns:
      caches, slots and the next row to be admitted.
    """
    free = jnp.nonzero(~slots.alive, size=refill_rows, fill_value=slots.row.shape[0])[0]
    row = next_row + jnp.arange(refill_rows, dtype=jnp.int32)
    waiting = row < num_rows
    target = jnp.where(waiting, free, slots.row.shape[0])  # behind the last slot: dropped
    source = jnp.minimum(row, prompts.tokens.shape[0] - 1)
    length = prompts.length[source]
    inside = jnp.arange(prompts.tokens.shape[1])[None, :] < length[:, None]
    # Padding may hold any placeholder; none of it reaches an embedding.
    tokens = constrain(jnp.where(inside, prompts.tokens[source], 0), "batch", None)

    def put(old: Array, new: Array) -> Array:
        return old.at[target].set(new.astype(old.dtype), mode="drop")

    last = jnp.take_along_axis(tokens, length[:, None] - 1, axis=1)[:, 0]
    slots = Slots(
        row=put(slots.row, row),
        sequence_id=put(slots.sequence_id, prompts.sequence_id[source]),
        length=put(slots.length, length - 1),
        pending=put(slots.pending, last),
        count=put(slots.count, jnp.zeros_like(row)),
        alive=put(slots.alive, waiting),
        finished=put(slots.finished, jnp.zeros_like(waiting)),
        nonfinite=put(slots.nonfinite, jnp.zeros_like(waiting)),
    )
    caches = tuple(
        _prefill(model, p, cache, tokens[:, :-1], target)
        for model, p, cache in zip(models, params, caches, strict=True)
    )
    return caches, slots, jnp.minimum(next_row + refill_rows, num_rows)


def _prefill(
    model: LanguageModel, params: Any, cache: Any, tokens: Int[Array, "R J"], target: Array
) -> Any:
    """Runs the prompts through a small cache of their own and inserts it at the target slots."""
    rows, width = tokens.shape
    if width == 0:  # one-token prompts: the only token is the pending one
        return cache
    start = jnp.zeros(rows, jnp.int32)
    _, fresh = model.forward(params, tokens, start, model.init_cache(rows, width))
    return jax.tree.map(
        lambda old, new: old.at[target, : new.shape[1]].set(new, mode="drop"), cache, fresh
    )


def _first(flags: Bool[Array, "W K"]) -> Int[Array, "W"]:
    """Index of the first True of each row, K where there is none."""
    index = jnp.argmax(flags, axis=1).astype(jnp.int32)
    return jnp.where(flags.any(axis=1), index, flags.shape[1])


def _is_any(tokens: Int[Array, "W K"], ids: tuple[int, ...]) -> Bool[Array, "W K"]:
    hit = jnp.zeros(tokens.shape, bool)
    for token in ids:
        hit |= tokens == token
    return hit
