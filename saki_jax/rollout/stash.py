"""Prompts on their way into the slots: prefilled once, kept, copied for each of their samples."""

from typing import Any, no_type_check

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Int

from saki_jax.models.lm import LanguageModel
from saki_jax.models.sharding import constrain
from saki_jax.rollout.batch import Prompts
from saki_jax.rollout.slots import Slots
from saki_jax.rollout.waiting import Queue


@no_type_check
@struct.dataclass
class Stash:
    """The Q prompts that were prefilled last. Prompt u of the queue lies in row u modulo Q."""

    caches: tuple[Any, ...]  # one a model, Q rows; a prompt's last token is not in them
    end: Int[Array, ""]  # the prompts before this one have been prefilled; a multiple of Q
    prefilled: Int[Array, ""]  # of them, those that had a token to prefill


def empty_stash(models: tuple[LanguageModel, ...], size: int, prompt_length: int) -> Stash:
    """Room for Q prompts of up to P tokens."""
    width = max(prompt_length - 1, 1)
    zero = [jnp.zeros((), jnp.int32) for _ in range(2)]
    return Stash(tuple(model.init_cache(size, width) for model in models), *zero)


def prefill_next(
    models: tuple[LanguageModel, ...],
    params: tuple[Any, ...],
    stash: Stash,
    prompts: Prompts,
    queue: Queue,
    size: int,
    widths: tuple[int, ...],
) -> Stash:
    """Puts the next Q prompts of the queue in place of those in the stash.

    The last token of a prompt stays pending, so a prefill needs no logits, and a prompt of one
    token needs no prefill.

    Args:
      models, params: whose caches the stash holds.
      stash: whose prompts are no longer wanted.
      prompts: the batch.
      queue: its order.
      size: Q.
      widths: columns of the compiled prefills, widest first; the narrowest that holds all Q
        prompts is run.
    """
    index = stash.end + jnp.arange(size, dtype=jnp.int32)
    there = index < queue.num_prompts
    source = queue.source[jnp.minimum(index, queue.source.shape[0] - 1)]
    length = jnp.where(there, prompts.length[source], 1)
    inside = jnp.arange(prompts.tokens.shape[1])[None, :] < length[:, None]
    # Padding may hold any placeholder; none of it reaches an embedding.
    tokens = constrain(jnp.where(inside, prompts.tokens[source], 0), "batch", None)
    start = jnp.zeros(size, jnp.int32)

    def prefill(width: int, caches: tuple[Any, ...]) -> tuple[Any, ...]:
        forwards = zip(models, params, caches, strict=True)
        return tuple(m.forward(p, tokens[:, :width], start, cache)[1] for m, p, cache in forwards)

    branches = [lambda caches, width=width: prefill(width, caches) for width in widths]
    longest = length.max() - 1
    narrowest = (jnp.array(widths, jnp.int32) >= longest).sum() - 1  # of those wide enough
    branch = jnp.where(longest == 0, len(widths), narrowest)
    return Stash(
        caches=jax.lax.switch(branch, [*branches, lambda caches: caches], stash.caches),
        end=stash.end + size,
        prefilled=stash.prefilled + (length > 1).sum(dtype=jnp.int32),
    )


def admit(
    caches: tuple[Any, ...],
    slots: Slots,
    stash: Stash,
    prompts: Prompts,
    queue: Queue,
    next_row: Int[Array, ""],
    size: int,
) -> tuple[tuple[Any, ...], Slots, Int[Array, ""]]:
    """Puts up to Q waiting rows whose prompts are in the stash into free slots.

    Args:
      caches: of the slots, one a model.
      slots: the rows in generation.
      stash: prompts, among them that of the next row.
      prompts: the batch.
      queue: its order.
      next_row: how many rows of the queue have been admitted.
      size: Q.

    Returns:
      caches, slots and the number of rows admitted by now.
    """
    num_slots = slots.row.shape[0]
    index = next_row + jnp.arange(size, dtype=jnp.int32)
    entry = jnp.minimum(index, queue.row.shape[0] - 1)
    row, prompt = queue.row[entry], queue.prompt[entry]
    free = jnp.nonzero(~slots.alive, size=size, fill_value=num_slots)[0].astype(jnp.int32)
    admitted = (index < queue.num_rows) & (prompt < stash.end) & (free < num_slots)
    target = jnp.where(admitted, free, num_slots)  # behind the last slot: dropped
    length = jnp.maximum(prompts.length[row], 1)  # rows that pad the batch have none
    last = prompts.tokens[row, length - 1]

    def put(old: Array, new: Array) -> Array:
        return old.at[target].set(new.astype(old.dtype), mode="drop")

    slots = Slots(
        row=put(slots.row, row),
        sequence_id=put(slots.sequence_id, prompts.sequence_id[row]),
        length=put(slots.length, length - 1),
        pending=put(slots.pending, last),
        count=put(slots.count, jnp.zeros_like(row)),
        alive=put(slots.alive, admitted),
        finished=put(slots.finished, jnp.zeros_like(admitted)),
        nonfinite=put(slots.nonfinite, jnp.zeros_like(admitted)),
    )

    def copy(old: Array, held: Array) -> Array:
        return old.at[target, : held.shape[1]].set(held[prompt % size], mode="drop")

    caches = jax.tree.map(copy, caches, stash.caches)
    return caches, slots, next_row + admitted.sum(dtype=jnp.int32)
