"""The parts of a wave, each compiled and timed on its own, on slots as the rollout has them."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.roofline import median_time
from bench.scenario import Pair
from saki_jax.rollout import bridge, coupling
from saki_jax.rollout.external_programs import Programs
from saki_jax.rollout.generate import student_wave
from saki_jax.rollout.keys import Purpose, position_keys, step_key, uniform
from saki_jax.rollout.resident import GUIDED_FIELDS
from saki_jax.rollout.slots import Block, Slots, commit, record
from saki_jax.rollout.spec import RolloutSpec
from saki_jax.rollout.wave import draft, verify


class Phases:
    """Times the phases of a wave of W slots; keep it while the benchmark runs.

    Args:
      pair: the models without imposed lengths.
      spec: block size, slots and lengths.
      rows: responses of the batch.
      prompt_length: width of the prompts.
      moments: what stands in the slots; every phase is timed at each of them.
      epsilon: the budget of the bridge.
    """

    def __init__(
        self,
        pair: Pair,
        spec: RolloutSpec,
        rows: int,
        prompt_length: int,
        moments: Sequence[Slots],
        epsilon: float,
    ):
        self.pair, self.spec, self.rows, self.prompt_length = pair, spec, rows, prompt_length
        self.epsilon = jnp.float32(epsilon)
        self.key = step_key(0, 0)
        self.moments = moments
        self._student_cache, self._teacher_cache = self._caches()
        self._programs = _programs(pair, spec)
        self._prefill = Programs(pair.student, pair.teacher, spec).prefill

    def _caches(self) -> tuple[Any, Any]:
        capacity = self.spec.cache_slots(self.prompt_length)
        make = jax.jit(
            lambda: tuple(
                model.init_cache(len(self.moments[0].count), capacity)
                for model in (self.pair.student, self.pair.teacher)
            )
        )
        return make()

    @property
    def prefill_prompts(self) -> int:
        """Prompts that are prefilled together."""
        return self.spec.num_prefill(self.rows)

    @property
    def context(self) -> float:
        """Mean number of cached tokens of a slot; one without a row has none."""
        return float(np.mean([np.asarray(slots.start) for slots in self.moments]))

    def seconds(self) -> dict[str, float]:
        """Seconds of each phase, its mean over the moments.

        ``step`` and ``draw`` are one decode step of the student and the draw in it; ``residual`` is
        needed only in waves with a rejection; ``prefill`` admits as many prompts as the engine
        does at a time.
        """
        each = [self._seconds_at(slots) for slots in self.moments]
        seconds = {name: float(np.mean([one[name] for one in each])) for name in each[0]}
        return seconds | {"prefill": self._prefill_seconds()}

    def _seconds_at(self, slots: Slots, repeats: int = 3) -> dict[str, float]:
        pair, programs, key = self.pair, self._programs, self.key
        found: dict[str, float] = {}

        def note(name: str, function: Callable, *arguments: Any) -> Any:
            kept = []

            def once():
                kept[:] = [function(*arguments)]
                return kept[0]

            found[name] = median_time(once, repeats=repeats)
            return kept[0]

        def drafted() -> tuple:
            self._student_cache, *rest = programs["draft"](
                pair.student_params, self._student_cache, slots, key
            )
            return rest

        def verified(proposal: jax.Array) -> jax.Array:
            self._teacher_cache, logits = programs["verify"](
                pair.teacher_params, self._teacher_cache, slots, proposal
            )
            return logits

        def stepped() -> jax.Array:
            self._student_cache, block = programs["step"](
                pair.student_params, self._student_cache, slots, key
            )
            return block.events["tokens"]

        note("step", stepped)
        proposal, logits_p = note("draft", drafted)
        note("draw", programs["draw"], logits_p[0], slots, key)
        logits_t = note("verify", verified, proposal)
        solved = note("bridge", programs[self.spec.solver], logits_p, logits_t, self.epsilon)
        note("couple", programs["couple"], solved, logits_p, logits_t, proposal, slots, key)
        note("residual", programs["residual"], solved, logits_p, logits_t, slots, key)
        table = {name: jnp.zeros(_table_shape(self), d) for name, d in GUIDED_FIELDS.items()}
        note("commit", programs["commit"], slots, _block(proposal), table)
        return found

    def _prefill_seconds(self, repeats: int = 3) -> float:
        tokens = jnp.ones((self.prefill_prompts, self.prompt_length - 1), jnp.int32)
        target = jnp.arange(self.prefill_prompts, dtype=jnp.int32)
        params = (self.pair.student_params, self.pair.teacher_params)

        def prefilled() -> Any:
            caches = (self._student_cache, self._teacher_cache)
            caches = self._prefill(caches, params, tokens, target)
            self._student_cache, self._teacher_cache = caches
            return caches

        return median_time(prefilled, repeats=repeats)

    def solvers(self, repeats: int = 3) -> dict[str, dict[str, float]]:
        """Each solver of the bridge on drafted logits: seconds a wave, readings of the logits."""
        slots = self.moments[len(self.moments) // 2]
        self._student_cache, proposal, logits_p = self._programs["draft"](
            self.pair.student_params, self._student_cache, slots, self.key
        )
        self._teacher_cache, logits_t = self._programs["verify"](
            self.pair.teacher_params, self._teacher_cache, slots, proposal
        )
        result = {}
        for solver in ("newton", "bisect"):
            solve = self._programs[solver]
            arguments = (logits_p, logits_t, self.epsilon)
            passes = np.asarray(solve(*arguments).passes)
            # The loop goes on until the last row is done; the survey is one reading more.
            result[solver] = {
                "seconds": median_time(solve, *arguments, repeats=repeats),
                "readings": float(passes.max()) + 1,
                "mean_passes_of_a_row": float(passes.mean()),
            }
        return result


def _table_shape(phases: Phases) -> tuple[int, int]:
    return phases.rows, phases.spec.response_length


def _programs(pair: Pair, spec: RolloutSpec) -> dict[str, Callable]:
    """The phases as jitted functions; caches are donated as in the engine's loop."""
    student, teacher = pair.student, pair.teacher

    def positions(slots: Slots) -> tuple[jax.Array, jax.Array]:
        offset = jnp.arange(spec.block_size, dtype=jnp.int32)[:, None]
        position = slots.count[None, :] + offset
        return jnp.broadcast_to(slots.sequence_id[None, :], position.shape), position

    def step(params, cache, slots, key):
        (cache,), block = student_wave(
            student, Purpose.DRAFT, (params,), (cache,), slots, key, jnp.float32(0)
        )
        return cache, block

    def draw(logits, slots, key):
        keys = position_keys(key, slots.sequence_id, slots.count, Purpose.DRAFT)
        return coupling.draw(logits, keys)

    def couple(solved, logits_p, logits_t, proposal, slots, key):
        terms = bridge.token_terms(solved, logits_p, logits_t, proposal)
        v = uniform(position_keys(key, *positions(slots), Purpose.ACCEPT))
        return terms, coupling.rejects(v, terms[-1])

    def residual(solved, logits_p, logits_t, slots, key):
        row, p, t = jax.tree.map(lambda x: x[0], (solved, logits_p, logits_t))
        keys = position_keys(key, slots.sequence_id, slots.count, Purpose.RESIDUAL)
        return coupling.draw_residual(row, p, t, keys)

    def commit_block(slots, block, table):
        after, kept = commit(
            slots, block, response_length=spec.response_length, end_ids=spec.end_ids
        )
        return after, record(table, block, slots, kept)

    return {
        "step": jax.jit(step, donate_argnums=1),
        "draft": jax.jit(
            lambda params, cache, slots, key: draft(
                student, params, cache, slots, key, spec.block_size
            ),
            donate_argnums=1,
        ),
        "draw": jax.jit(draw),
        "verify": jax.jit(
            lambda params, cache, slots, proposal: verify(teacher, params, cache, slots, proposal),
            donate_argnums=1,
        ),
        "newton": jax.jit(functools.partial(bridge.solve, solver="newton")),
        "bisect": jax.jit(functools.partial(bridge.solve, solver="bisect")),
        "couple": jax.jit(couple),
        "residual": jax.jit(residual),
        "commit": jax.jit(commit_block),
    }


def _block(proposal: jax.Array) -> Block:
    """A block [W, K] with every position accepted."""
    tokens = proposal.T
    events = {name: jnp.zeros(tokens.shape, dtype) for name, dtype in GUIDED_FIELDS.items()}
    usable = jnp.full(tokens.shape[0], tokens.shape[1], jnp.int32)
    return Block(events | {"tokens": tokens}, usable, jnp.zeros(tokens.shape, bool))
