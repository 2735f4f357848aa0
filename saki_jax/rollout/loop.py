"""The engine's loop: waves over fixed-shape caches until every row is answered.

One jitted call admits waiting prompts into free slots and runs waves in a `lax.while_loop`; the
host only repeats it. What a wave is (guided by the teacher, or the student alone) is an argument.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from saki_jax.models.lm import LanguageModel
from saki_jax.models.sharding import batch_sharding
from saki_jax.rollout.batch import Prompts, Rollout
from saki_jax.rollout.resident import (
    Resident,
    allocate,
    assemble,
    count,
    harvest,
    rows_over_devices,
)
from saki_jax.rollout.slots import Block, admit, commit, record
from saki_jax.rollout.spec import RolloutSpec

Wave = Callable[..., tuple[tuple[Any, ...], Block]]


class Progress(NamedTuple):
    """What the host hears between two calls of the compiled loop. Plain integers."""

    rows_done: int
    rows_total: int
    committed: int  # response tokens so far
    corrections: int
    waves: int  # student-only: decode steps


class Loop:
    """Runs one kind of wave over batches of prompts; compiled once for each shape of prompts.

    Args:
      models: the language models whose caches the wave uses.
      wave: ``(params, caches, slots, key, epsilon) -> (caches, Block)``; params and caches are
        tuples as `models`.
      block_size: positions that a wave offers.
      spec: lengths, slots, end ids.
      fields: dtype of each event that the wave's blocks carry.
      mesh: where the rows are laid over ("data", "fsdp"); None = one device.

    Raises:
      RuntimeError: JAX is configured to draw numbers that depend on the layout.
    """

    def __init__(
        self,
        models: tuple[LanguageModel, ...],
        wave: Wave,
        block_size: int,
        spec: RolloutSpec,
        fields: dict[str, Any],
        mesh: Mesh | None,
    ):
        if not jax.config.jax_threefry_partitionable:
            raise RuntimeError(
                "jax_threefry_partitionable is off, so draws would depend on how rows lie on the "
                "devices; leave it on (the default of JAX)"
            )
        self._models = models
        self._wave = wave
        self._spec = spec
        self._mesh = mesh
        self._shards = 1 if mesh is None else mesh.shape["data"] * mesh.shape["fsdp"]
        self._start = jax.jit(
            lambda prompts: allocate(models, spec, fields, prompts, self._sizes(prompts)[0])
        )
        self._advance = None  # made when the layout of its carry is known
        self._finish = jax.jit(
            functools.partial(assemble, block_size=block_size, spec=spec), static_argnames="rows"
        )

    def __call__(
        self,
        params: tuple[Any, ...],
        prompts: Prompts,
        key: jax.Array,
        epsilon: Float[Array, ""],
        on_progress: Callable[[Progress], None] | None = None,
    ) -> Rollout:
        """Answers all rows. ``on_progress`` is called on the host, between jitted calls."""
        rows = check_prompts(prompts, self._models[0].vocab_size)
        with mesh_context(self._mesh):
            prompts, key = self._place(prompts, key)
            num_rows = jnp.int32(rows)
            state = self._start(prompts)
            advance = self._compiled(state)
            while True:
                state, report = advance(state, params, prompts, num_rows, key, epsilon)
                progress = Progress(*np.asarray(report).tolist())  # the host's only wait
                if on_progress is not None:
                    on_progress(progress)
                if progress.rows_done == progress.rows_total:
                    return self._finish(state, prompts, epsilon, rows=rows)

    def _place(self, prompts: Prompts, key: jax.Array) -> tuple[Prompts, jax.Array]:
        """Pads the rows to a multiple of the devices and lays them there, as int32."""
        extra = -prompts.tokens.shape[0] % self._shards

        def one(x: Any) -> Array:
            if extra:
                x = np.pad(np.asarray(x), [(0, extra), *[(0, 0)] * (x.ndim - 1)])
            x = x.astype(np.int32)
            if self._mesh is None:
                return jnp.asarray(x)
            return jax.device_put(x, batch_sharding(self._mesh))

        if self._mesh is not None:
            key = jax.device_put(key, NamedSharding(self._mesh, PartitionSpec()))
        return jax.tree.map(one, prompts), key

    def _sizes(self, prompts: Prompts) -> tuple[int, int]:
        """W slots, and R prompts prefilled together."""
        rows = prompts.tokens.shape[0]
        spec = self._spec
        return spec.num_slots(rows, self._shards), spec.num_refill(rows, self._shards)

    def _compiled(self, state: Resident) -> Callable:
        if self._advance is None:
            out = None
            if self._mesh is not None:
                # The carry comes back laid out as it went in; otherwise the second call would be
                # compiled anew.
                layout = jax.tree.map(lambda x: x.sharding, state)
                out = (layout, NamedSharding(self._mesh, PartitionSpec()))
            self._advance = jax.jit(self._run, donate_argnums=0, out_shardings=out)
        return self._advance

    def _run(
        self,
        state: Resident,
        params: tuple[Any, ...],
        prompts: Prompts,
        num_rows: Int[Array, ""],
        key: jax.Array,
        epsilon: Float[Array, ""],
    ) -> tuple[Resident, Int[Array, "5"]]:
        """Admits prompts, runs waves until the host is wanted, harvests."""
        spec = self._spec
        _, refill_rows = self._sizes(prompts)

        def can_admit(state: Resident) -> Array:
            room = (~state.slots.alive).sum() >= refill_rows
            return room & (state.next_row < num_rows)

        def admit_some(state: Resident) -> Resident:
            caches, slots, next_row = admit(
                self._models,
                params,
                state.caches,
                state.slots,
                prompts,
                state.next_row,
                num_rows,
                refill_rows,
            )
            return state.replace(caches=caches, slots=slots, next_row=next_row)

        def go_on(carry: tuple[Array, Resident]) -> Array:
            waves, state = carry
            some_alive = state.slots.alive.any()
            within_call = waves < spec.waves_per_call  # then the host wants to hear something
            nothing_to_admit = ~can_admit(state)
            return some_alive & within_call & nothing_to_admit

        def one_wave(carry: tuple[Array, Resident]) -> tuple[Array, Resident]:
            waves, state = carry
            caches, block = self._wave(params, state.caches, state.slots, key, epsilon)
            slots, kept = commit(
                state.slots, block, response_length=spec.response_length, end_ids=spec.end_ids
            )
            events = record(state.events, block, state.slots, kept)
            tally = count(state.tally, block, state.slots, kept)
            return waves + 1, state.replace(caches=caches, slots=slots, events=events, tally=tally)

        state = jax.lax.while_loop(can_admit, admit_some, state)
        _, state = jax.lax.while_loop(go_on, one_wave, (jnp.int32(0), state))
        state = rows_over_devices(harvest(state))
        unanswered = num_rows - state.next_row + state.slots.alive.sum(dtype=jnp.int32)
        tally = state.tally
        report = [num_rows - unanswered, num_rows, tally.committed, tally.corrections, tally.waves]
        return state, jnp.stack(report)


def mesh_context(mesh: Mesh | None) -> contextlib.AbstractContextManager:
    """The mesh in context while something is traced or run."""
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


def check_prompts(prompts: Prompts, vocab_size: int) -> int:
    """The number of rows B.

    Raises:
      ValueError: no rows, a length outside 1..P, a token that the model does not have, or two rows
        of one sequence id.
    """
    rows, width = prompts.tokens.shape
    if rows == 0:
        raise ValueError("a rollout needs at least one prompt, got 0 rows")
    length, ids = np.asarray(prompts.length), np.asarray(prompts.sequence_id)
    wrong = np.flatnonzero((length < 1) | (length > width))
    if wrong.size:
        row = int(wrong[0])
        raise ValueError(
            f"prompt row {row} has length {int(length[row])}; lengths must lie in 1..{width}, the "
            "width of the prompts. An empty prompt has no token to start from"
        )
    tokens = np.asarray(prompts.tokens)
    inside = np.arange(width)[None, :] < length[:, None]
    unknown = inside & ((tokens < 0) | (tokens >= vocab_size))
    if unknown.any():
        row, column = np.argwhere(unknown)[0].tolist()
        raise ValueError(
            f"prompt row {row} holds the id {int(tokens[row, column])} at {column}; the model has "
            f"the ids 0..{vocab_size - 1}. Do prompts and model belong to one tokenizer?"
        )
    if np.unique(ids).size != rows:
        raise ValueError(
            f"{rows} rows have only {np.unique(ids).size} distinct sequence ids; rows with equal "
            "ids would draw the same random numbers. Give each row of a step an id of its own"
        )
    return rows
