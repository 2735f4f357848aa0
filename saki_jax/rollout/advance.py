"""The compiled call of the engine's loop: admits waiting rows, then runs waves."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from saki_jax.models.lm import LanguageModel
from saki_jax.rollout.batch import Prompts
from saki_jax.rollout.resident import Resident, Sizes, count, harvest, rows_over_devices
from saki_jax.rollout.slots import Block, commit, record
from saki_jax.rollout.spec import RolloutSpec
from saki_jax.rollout.stash import admit, prefill_next
from saki_jax.rollout.waiting import Queue

Wave = Callable[..., tuple[tuple[Any, ...], Block]]


class Report(NamedTuple):
    """What the host hears of a call, one array on its way there. Plain integers."""

    rows_done: int
    rows_total: int
    committed: int  # response tokens so far
    corrections: int
    waves: int
    waiting: int  # rows that have no slot yet


def advance(
    models: tuple[LanguageModel, ...],
    wave: Wave,
    spec: RolloutSpec,
    sizes: Sizes,
    state: Resident,
    params: tuple[Any, ...],
    prompts: Prompts,
    queue: Queue,
    key: jax.Array,
    epsilon: Float[Array, ""],
) -> tuple[Resident, Int[Array, "6"]]:
    """Fills the free slots if enough are free, runs waves until the host is wanted, harvests.

    The host is wanted when waiting rows can be admitted, when no row lives, when so few live and
    none waits that they had better be gathered (compact.py), and every ``spec.waves_per_call``
    waves.
    """
    fewer = sizes.compact if sizes.compact < sizes.slots else 0
    # Everything is a while loop, also what happens at most once: its state stays in place, where
    # a conditional would copy the caches.

    def is_waiting(state: Resident) -> Array:
        return state.next_row < queue.num_rows

    def can_refill(state: Resident) -> Array:
        return is_waiting(state) & ((~state.slots.alive).sum() >= sizes.refill)

    def stash_is_used_up(state: Resident) -> Array:
        entry = jnp.minimum(state.next_row, queue.prompt.shape[0] - 1)
        return queue.prompt[entry] >= state.stash.end

    def prefill(state: Resident) -> Resident:
        widths = spec.prefill_widths(prompts.tokens.shape[1])
        stash = prefill_next(models, params, state.stash, prompts, queue, sizes.prefill, widths)
        return state.replace(stash=stash)

    def admit_some(state: Resident) -> Resident:
        state = jax.lax.while_loop(stash_is_used_up, prefill, state)
        caches, slots, next_row = admit(
            state.caches, state.slots, state.stash, prompts, queue, state.next_row, sizes.prefill
        )
        return state.replace(caches=caches, slots=slots, next_row=next_row)

    def go_on(carry: tuple[Array, Resident]) -> Array:
        waves, state = carry
        some_alive = state.slots.alive.any()
        within_call = waves < spec.waves_per_call  # then the host wants to hear something
        nothing_to_admit = ~can_refill(state)
        worth_its_slots = is_waiting(state) | (state.slots.alive.sum() > fewer)
        return some_alive & within_call & nothing_to_admit & worth_its_slots

    def one_wave(carry: tuple[Array, Resident]) -> tuple[Array, Resident]:
        waves, state = carry
        caches, block = wave(params, state.caches, state.slots, key, epsilon)
        slots, kept = commit(
            state.slots, block, response_length=spec.response_length, end_ids=spec.end_ids
        )
        events = record(state.events, block, state.slots, kept)
        tally = count(state.tally, block, state.slots, kept)
        return waves + 1, state.replace(caches=caches, slots=slots, events=events, tally=tally)

    if state.stash.caches:  # given up when nothing waited any more
        refilling = can_refill(state)
        state = jax.lax.while_loop(
            lambda state: refilling & is_waiting(state) & (~state.slots.alive).any(),
            admit_some,
            state,
        )
    _, state = jax.lax.while_loop(go_on, one_wave, (jnp.int32(0), state))
    state = rows_over_devices(harvest(state))
    waiting = queue.num_rows - state.next_row
    report = Report(
        rows_done=queue.num_rows - waiting - state.slots.alive.sum(dtype=jnp.int32),
        rows_total=queue.num_rows,
        committed=state.tally.committed,
        corrections=state.tally.corrections,
        waves=state.tally.waves,
        waiting=waiting,
    )
    return state, jnp.stack(report)
