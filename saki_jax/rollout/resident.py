"""The state of a rollout that stays on the devices, and the `Rollout` made of it at the end."""

from typing import Any, NamedTuple, no_type_check

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int

from saki_jax.models.lm import LanguageModel
from saki_jax.models.sharding import constrain
from saki_jax.rollout.batch import Counters, Prompts, Rollout
from saki_jax.rollout.slots import Block, Slots, empty_slots
from saki_jax.rollout.spec import RolloutSpec
from saki_jax.rollout.stash import Stash, empty_stash

_IDS = jnp.int32
_FLAG = jnp.bool_
_NUMBER = jnp.float32

# What a wave of the student alone tells of each position, and what a guided one tells.
STUDENT_FIELDS = {"tokens": _IDS, "log_p": _NUMBER, "entropy": _NUMBER}
GUIDED_FIELDS = STUDENT_FIELDS | {
    "proposal": _IDS,
    "corrected": _FLAG,
    "log_t": _NUMBER,
    "log_q": _NUMBER,
    "accept_prob": _NUMBER,
    "beta": _NUMBER,
    "kl": _NUMBER,
    "tv": _NUMBER,
    "teacher_mode": _IDS,
    "teacher_sample": _IDS,
}


@no_type_check
@struct.dataclass
class Tally:
    """Counts that ride along; scalars."""

    waves: Int[Array, ""]
    row_waves: Int[Array, ""]  # summed over the rows alive
    drafted: Int[Array, ""]  # positions of a block, summed over the waves
    committed: Int[Array, ""]
    corrections: Int[Array, ""]


@no_type_check
@struct.dataclass
class Resident:
    """Everything that stays on the devices between calls; donated, so nothing is copied."""

    caches: tuple[Any, ...]  # one a model, W rows
    slots: Slots  # W rows
    stash: Stash  # the prompts prefilled last
    events: dict[str, Array]  # fields of `Rollout`, [B, T] each
    length: Int[Array, "B"]  # of the rows harvested so far
    finished: Bool[Array, "B"]
    nonfinite: Bool[Array, "B"]
    next_row: Int[Array, ""]  # rows of the queue admitted so far
    tally: Tally


class Sizes(NamedTuple):
    """Of the storage for a batch."""

    slots: int  # W
    refill: int  # R, free slots at which rows are admitted
    prefill: int  # Q, prompts prefilled together
    compact: int  # W', to which the host shrinks W when so few rows live and none waits; W = never


def allocate(
    models: tuple[LanguageModel, ...],
    spec: RolloutSpec,
    fields: dict[str, Any],
    prompts: Prompts,
    sizes: Sizes,
) -> Resident:
    """Fixed-shape storage for a batch: empty caches of W slots and Q prompts, blank results."""
    rows, prompt_length = prompts.tokens.shape
    zero = [jnp.zeros((), jnp.int32) for _ in range(6)]
    state = Resident(
        caches=tuple(m.init_cache(sizes.slots, spec.cache_slots(prompt_length)) for m in models),
        slots=empty_slots(sizes.slots, rows),
        stash=empty_stash(models, sizes.prefill, prompt_length),
        events={name: _blank(fields[name], rows, spec) for name in fields},
        length=jnp.zeros(rows, jnp.int32),
        finished=jnp.zeros(rows, bool),
        nonfinite=jnp.zeros(rows, bool),
        next_row=zero[0],
        tally=Tally(*zero[1:]),
    )
    return rows_over_devices(state)


def cache_bytes(models: tuple[LanguageModel, ...], rows: int, slots: int) -> int:
    """Bytes of the models' caches of so many rows and slots, together."""
    shapes = jax.eval_shape(lambda: tuple(model.init_cache(rows, slots) for model in models))
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))


def harvest(state: Resident) -> Resident:
    """Copies what is known of each slot's row into the batch's arrays."""
    slots = state.slots

    def put(old: Array, new: Array) -> Array:
        return old.at[slots.row].set(new, mode="drop")

    return state.replace(
        length=put(state.length, slots.count),
        finished=put(state.finished, slots.finished),
        nonfinite=put(state.nonfinite, slots.nonfinite),
    )


def count(tally: Tally, block: Block, slots: Slots, kept: Int[Array, "W"]) -> Tally:
    """Adds a wave. ``slots`` is the state before it, so that ``alive`` tells who took part."""
    corrections = jnp.int32(0)
    if "corrected" in block.events:
        offset = jnp.arange(block.nonfinite.shape[1], dtype=jnp.int32)[None, :]
        corrections = (block.events["corrected"] & (offset < kept[:, None])).sum(dtype=jnp.int32)
    return Tally(
        waves=tally.waves + 1,
        row_waves=tally.row_waves + slots.alive.sum(dtype=jnp.int32),
        drafted=tally.drafted + block.nonfinite.shape[1],
        committed=tally.committed + kept.sum(dtype=jnp.int32),
        corrections=tally.corrections + corrections,
    )


def rows_over_devices(tree: Any) -> Any:
    """Lays slots and results over the devices by rows; the models lay out their own caches."""

    def lay(x: Array) -> Array:
        return constrain(x, "batch", *(None,) * (x.ndim - 1)) if x.ndim else x

    if isinstance(tree, Resident):
        plain = jax.tree.map(lay, tree.replace(caches=(), stash=()))
        return plain.replace(caches=tree.caches, stash=tree.stash)
    return jax.tree.map(lay, tree)


def results_of(state: Resident) -> Resident:
    """The state without what has served its turn and may have any number of slots."""
    return state.replace(caches=(), slots=None, stash=state.stash.replace(caches=()))


def assemble(
    state: Resident, prompts: Prompts, epsilon: Array, rows: int, spec: RolloutSpec
) -> Rollout:
    """The `Rollout` of a finished state, without the rows that padded the batch.

    Args:
      state: with all rows harvested (`results_of`).
      prompts: as laid out for the loop.
      epsilon: the KL budget that was used.
      rows: B, the real rows.
      spec: for the pad id and T.
    """
    valid = jnp.arange(spec.response_length)[None, :] < state.length[:, None]
    guided = "log_t" in state.events
    # A field that the wave does not know is blank, except for these.
    student_only = {
        "proposal": state.events["tokens"],
        "log_q": state.events["log_p"],
        "accept_prob": valid.astype(jnp.float32),
    }
    events = {
        name: _blank(dtype, state.length.shape[0], spec) for name, dtype in GUIDED_FIELDS.items()
    }
    events |= ({} if guided else student_only) | state.events
    by_row = {
        "prompts": prompts,
        "length": state.length,
        "finished": state.finished,
        "nonfinite": state.nonfinite,
        **events,
    }
    by_row = rows_over_devices(jax.tree.map(lambda x: x[:rows], by_row))
    waves = state.tally.waves
    counters = Counters(
        waves=waves,
        row_waves=state.tally.row_waves,
        student_forwards=state.tally.drafted,
        teacher_forwards=waves if guided else jnp.zeros_like(waves),
        committed=state.tally.committed,
        prefilled=state.stash.prefilled,
    )
    return Rollout(**by_row, epsilon=epsilon, counters=counters)


def _blank(dtype: Any, rows: int, spec: RolloutSpec) -> Array:
    return jnp.full((rows, spec.response_length), spec.pad_id if dtype == _IDS else 0, dtype)
