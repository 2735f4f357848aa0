"""The engine's loop: waves over fixed-shape caches until every row is answered.

One jitted call admits waiting rows into free slots and runs waves in a `lax.while_loop`; the host
only repeats it. What a wave is (guided by the teacher, or the student alone) is an argument.
"""

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from saki_jax.models.lm import LanguageModel
from saki_jax.models.sharding import batch_sharding
from saki_jax.rollout.advance import Report, Wave, advance
from saki_jax.rollout.batch import Prompts, Rollout
from saki_jax.rollout.block_size import best_block_size
from saki_jax.rollout.compact import compact
from saki_jax.rollout.resident import (
    Resident,
    Sizes,
    allocate,
    assemble,
    cache_bytes,
    results_of,
)
from saki_jax.rollout.spec import RolloutSpec
from saki_jax.rollout.waiting import Queue, check_prompts, make_queue


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
      other_waves: the same wave for other block sizes, from which the host chooses between calls
        (``spec.block_sizes``).
    """

    def __init__(
        self,
        models: tuple[LanguageModel, ...],
        wave: Wave,
        block_size: int,
        spec: RolloutSpec,
        fields: dict[str, Any],
        mesh: Mesh | None,
        other_waves: Mapping[int, Wave] | None = None,
    ):
        self._models = models
        self._block_size = block_size
        self._waves = {**(other_waves or {}), block_size: wave}
        self._spec = spec
        self._mesh = mesh
        self._shards = 1 if mesh is None else mesh.shape["data"] * mesh.shape["fsdp"]
        self._start = jax.jit(
            functools.partial(allocate, models, spec, fields), static_argnames="sizes"
        )
        self._programs: dict[tuple[Sizes, int], Callable] = {}
        self._known: set[tuple[Sizes, tuple[int, ...]]] = set()  # what `_compile_all` has done
        self._finish = jax.jit(functools.partial(assemble, spec=spec), static_argnames="rows")

    def __call__(
        self,
        params: tuple[Any, ...],
        prompts: Prompts,
        key: jax.Array,
        epsilon: Float[Array, ""],
        on_progress: Callable[[Progress], None] | None = None,
    ) -> Rollout:
        """Answers all rows. ``on_progress`` is called on the host, between jitted calls.

        Raises:
          ValueError: prompts that cannot be answered (see `check_prompts`), or a cache budget that
            does not hold a row.
          RuntimeError: JAX is configured to draw numbers that depend on the layout.
        """
        if not jax.config.jax_threefry_partitionable:
            raise RuntimeError(
                "jax_threefry_partitionable is off, so draws would depend on how rows lie on the "
                "devices; leave it on (the default of JAX)"
            )
        rows = check_prompts(prompts, self._models[0].vocab_size)
        with mesh_context(self._mesh):
            prompts, queue, key = self._place(prompts, key)
            sizes = self._sizes(prompts)
            self._compile_all(sizes, params, prompts, queue, key, epsilon)
            state = self._start(prompts, sizes=sizes)
            block_size = self._block_size
            while True:
                run = self._compiled(state, sizes, block_size)
                state, report = run(state, params, prompts, queue, key, epsilon)
                report = Report(*np.asarray(report).tolist())  # the host's only wait
                if on_progress is not None:
                    on_progress(Progress(*report[:-1]))
                alive = report.rows_total - report.rows_done - report.waiting
                if report.waiting + alive == 0:
                    return self._finish(results_of(state), prompts, epsilon, rows=rows)
                while report.waiting == 0 and alive <= sizes.compact < sizes.slots:
                    sizes = self._smaller(sizes)
                    state = compact(state, sizes.slots)
                if self._spec.block_sizes:
                    block_size = self._best_block_size(report)

    def _place(self, prompts: Prompts, key: jax.Array) -> tuple[Prompts, Queue, jax.Array]:
        """Pads the rows to a multiple of the devices and lays them there, as int32; and the queue
        of them, which every device has."""
        extra = -prompts.tokens.shape[0] % self._shards
        queue = make_queue(prompts, prompts.tokens.shape[0] + extra)

        def one(x: Any) -> Array:
            if extra:
                x = np.pad(np.asarray(x), [(0, extra), *[(0, 0)] * (x.ndim - 1)])
            x = x.astype(np.int32)
            if self._mesh is None:
                return jnp.asarray(x)
            return jax.device_put(x, batch_sharding(self._mesh))

        if self._mesh is not None:
            queue, key = jax.device_put((queue, key), NamedSharding(self._mesh, PartitionSpec()))
        return jax.tree.map(one, prompts), queue, key

    def _sizes(self, prompts: Prompts) -> Sizes:
        """Of the storage for these prompts, within the budget for caches."""
        (rows, length), spec, shards = prompts.tokens.shape, self._spec, self._shards
        prefill = spec.num_prefill(rows, shards)
        fit = None
        if spec.cache_gib:
            stash = cache_bytes(self._models, prefill, length)
            one_row = cache_bytes(self._models, 1, spec.cache_slots(length))
            fit = int((spec.cache_gib * 2**30 - stash) // one_row)
        slots = spec.num_slots(rows, shards, fit)
        refill = spec.num_refill(rows, slots, shards)
        return Sizes(slots, refill, prefill, spec.compact_slots(slots, shards))

    def _smaller(self, sizes: Sizes) -> Sizes:
        """The storage after the last rows were gathered."""
        after = self._spec.compact_slots(sizes.compact, self._shards)
        return sizes._replace(slots=sizes.compact, compact=after)

    def _compile_all(
        self,
        sizes: Sizes,
        params: tuple[Any, ...],
        prompts: Prompts,
        queue: Queue,
        key: jax.Array,
        epsilon: Float[Array, ""],
    ) -> None:
        """Where there are several programs, compiles all at once by running them without any rows.

        Otherwise a program would be compiled in the middle of training, at the first step at which
        so few rows outlive the others.
        """
        known = sizes, prompts.tokens.shape
        several = sizes.compact < sizes.slots or len(self._waves) > 1
        if known in self._known or not several:
            return
        self._known.add(known)
        nobody = queue.replace(num_rows=queue.num_rows * 0)
        state = self._start(prompts, sizes=sizes)
        while True:
            for block_size in self._waves:
                run = self._compiled(state, sizes, block_size)
                state, _ = run(state, params, prompts, nobody, key, epsilon)
            if sizes.compact == sizes.slots:
                return
            sizes = self._smaller(sizes)
            state = compact(state, sizes.slots)

    def _best_block_size(self, report: Report) -> int:
        """By the corrections so far: the same on every host, and after a restart."""
        rate = report.corrections / max(report.committed, 1)
        return best_block_size(self._spec.block_sizes, self._spec.wave_costs(), rate)

    def _compiled(self, state: Resident, sizes: Sizes, block_size: int) -> Callable:
        program = sizes, block_size
        if program not in self._programs:
            out = None
            if self._mesh is not None:
                # The carry comes back laid out as it went in; otherwise the second call would be
                # compiled anew.
                layout = jax.tree.map(lambda x: x.sharding, state)
                out = (layout, NamedSharding(self._mesh, PartitionSpec()))
            run = functools.partial(
                advance, self._models, self._waves[block_size], self._spec, sizes
            )
            self._programs[program] = jax.jit(run, donate_argnums=0, out_shardings=out)
        return self._programs[program]


def mesh_context(mesh: Mesh | None) -> contextlib.AbstractContextManager:
    """The mesh in context while something is traced or run."""
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)
