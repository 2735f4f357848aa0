"""The loop alone, with a wave that needs no model: admission, calls, progress, counters."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from saki_jax.rollout import compact as gathering
from saki_jax.rollout import loop as looping
from saki_jax.rollout.advance import advance
from saki_jax.rollout.keys import step_key
from saki_jax.rollout.loop import Loop
from saki_jax.rollout.resident import STUDENT_FIELDS, Sizes, allocate
from saki_jax.rollout.slots import Block
from saki_jax.rollout.spec import RolloutSpec
from saki_jax.rollout.waiting import make_queue
from toy_engines import assert_same
from toys import lookup_model, prompts_of

V = 100
END = 99
T = 16
KEY = step_key(0, 1)


def counting_wave(block_size, params, caches, slots, key, epsilon):
    """A row with the id n (modulo 50) says 1, 2, .. n - 1, END, and all of it is accepted."""
    del params, key, epsilon
    said = slots.count[:, None] + 1 + jnp.arange(block_size)[None, :]
    tokens = jnp.where(said >= slots.sequence_id[:, None] % 50, END, said)
    number = jnp.zeros(tokens.shape)
    events = {"tokens": tokens, "log_p": number - 1, "entropy": number}
    usable = jnp.full_like(slots.count, block_size)
    return caches, Block(events, usable, jnp.zeros(tokens.shape, bool))


def loop_of(block_size: int = 2, response_length: int = T, **changes) -> tuple[Loop, RolloutSpec]:
    spec = RolloutSpec(response_length=response_length, end_ids=(END,), pad_id=0, **changes)
    wave = functools.partial(counting_wave, block_size)
    return Loop((lookup_model(V, 1),), wave, block_size, spec, STUDENT_FIELDS, None), spec


def answer(lengths: list[int], heard: list | None = None, **changes):
    """Rows that end after so many tokens (longer than T: cut there)."""
    loop, _ = loop_of(**changes)
    ids = [n + 50 * i for i, n in enumerate(lengths)]
    batch = prompts_of([[1]] * len(lengths), sequence_id=ids)
    table = jnp.zeros(((V + 1) * 2, V))
    return loop((table,), batch, KEY, jnp.float32(0), None if heard is None else heard.append)


@pytest.mark.parametrize(
    ("slots", "refill", "waves"),
    [(0, 0, 64), (1, 0, 64), (2, 1, 1), (3, 0, 1), (3, 3, 64), (7, 3, 1)],
)
def test_every_row_is_answered_once_whatever_the_slots(slots, refill, waves):
    lengths = [5, 1, 2, 16, 9, 3, 40]
    r = answer(lengths, slots=slots, refill_rows=refill, waves_per_call=waves)
    assert r.length.tolist() == [min(n, T) for n in lengths]
    assert r.finished.tolist() == [n <= T for n in lengths]
    for tokens, n in zip(np.asarray(r.tokens), lengths, strict=True):
        said = [*range(1, n), END][:T]
        assert tokens.tolist() == said + [0] * (T - len(said))
    assert int(r.counters.committed) == sum(min(n, T) for n in lengths)
    assert int(r.counters.row_waves) == sum(-(-min(n, T) // 2) for n in lengths)


def watched_loop(corrected: bool = False, **changes):
    """``rollout(lengths, step=1)``, a list to which (slots, block size) of each wave that is
    compiled is added, and the loop."""
    compiled = []

    def wave(block_size, params, caches, slots, key, epsilon):
        compiled.append((slots.count.shape[0], block_size))
        caches, block = counting_wave(block_size, params, caches, slots, key, epsilon)
        flags = jnp.full(block.nonfinite.shape, corrected)
        return caches, block._replace(events=block.events | {"corrected": flags})

    spec = RolloutSpec(response_length=T, end_ids=(END,), pad_id=0, block_size=2, **changes)
    waves = {size: functools.partial(wave, size) for size in (2, *spec.block_sizes)}
    fields = STUDENT_FIELDS | {"corrected": jnp.bool_}
    loop = Loop((lookup_model(V, 1),), waves[2], 2, spec, fields, None, waves)

    def rollout(lengths: list[int], step: int = 1):
        ids = [n + 50 * i for i, n in enumerate(lengths)]
        batch = prompts_of([[1]] * len(lengths), sequence_id=ids)
        params = (jnp.zeros(((V + 1) * 2, V)),)
        return loop(params, batch, step_key(0, step), jnp.float32(0))

    return rollout, compiled, loop


def shapes_of_waves(lengths: list[int], corrected: bool = False, **changes):
    """The rollout, and the (slots, block size) of each wave that was compiled, in order."""
    rollout, compiled, _ = watched_loop(corrected, **changes)
    r = rollout(lengths)
    return r, list(dict.fromkeys(compiled))


def test_the_last_rows_move_into_fewer_slots(monkeypatch):
    gathered = []

    def watched(state, size):
        gathered.append((int(state.slots.alive.sum()), size))
        return gathering.compact(state, size)

    monkeypatch.setattr(looping, "compact", watched)
    lengths = [16, 3, 5, 1, 12, 2, 9]
    r, waves = shapes_of_waves(lengths, compact=1)
    # First without rows, so that all is compiled; then as the rows end.
    assert gathered == [(0, 2), (0, 1), (2, 2), (1, 1)]
    assert [slots for slots, _ in waves] == [7, 2, 1]
    gathered.clear()
    never, waves = shapes_of_waves(lengths)
    assert [slots for slots, _ in waves] == [7]
    assert gathered == []
    assert_same(r, never)
    # While rows wait, their slots are needed.
    r, waves = shapes_of_waves(lengths, compact=1, slots=4, refill_rows=4)
    assert gathered == [(0, 1), (1, 1)]
    assert_same(r, never, but=("counters",))


@pytest.mark.parametrize("options", [{"compact": 1}, {"block_sizes": (1, 4), "waves_per_call": 1}])
def test_j09_nothing_is_compiled_after_the_first_batch(options):
    """Whatever lengths come, also where the first batch never had few rows left."""
    rollout, compiled, loop = watched_loop(corrected=True, **options)
    helpers = gathering._take, gathering._live_first, loop._finish
    rollout([7] * 8)
    before = [len(compiled), *(f._cache_size() for f in helpers)]
    for step, lengths in enumerate(([1, 16, 2, 2, 3, 5, 5, 9], [15] + [1] * 7)):
        assert rollout(lengths, step + 2).length.tolist() == lengths
    assert [len(compiled), *(f._cache_size() for f in helpers)] == before


@pytest.mark.parametrize(("corrected", "size"), [(False, 8), (True, 1)])
def test_the_block_size_follows_the_corrections(corrected, size):
    r, waves = shapes_of_waves([16, 3, 9], corrected, block_sizes=(1, 4, 8), waves_per_call=1)
    assert {size for _, size in waves} == {1, 2, 4, 8}  # all compiled at once
    assert r.length.tolist() == [16, 3, 9]
    assert int(r.counters.student_forwards) == 2 + size * (int(r.counters.waves) - 1)


def test_slots_are_refilled_as_rows_finish():
    """Two slots: the long row keeps one, the short ones share the other."""
    r = answer([16, 2, 2, 2, 2], slots=2, refill_rows=1)
    assert int(r.counters.waves) == 8
    waiting = answer([16, 2, 2, 2, 2], slots=2, refill_rows=2)  # refills pairs only
    assert int(waiting.counters.waves) == 8 + 1 + 1


def test_the_memory_for_caches_limits_the_slots():
    """A slot of the lookup model holds 8 bytes a token; a row has 1 + T + K tokens of room."""
    lengths = [5, 3, 9, 2, 7, 3]
    one_row, stash = 8 * (1 + T + 8), 8 * len(lengths)
    three = answer(lengths, slots=3)
    budget = (stash + 3.9 * one_row) / 2**30
    within = answer(lengths, cache_gib=budget)
    assert int(within.counters.waves) == int(three.counters.waves)
    assert int(three.counters.waves) > int(answer(lengths).counters.waves)
    with pytest.raises(ValueError, match="does not hold the caches of 1 row"):
        answer(lengths, cache_gib=(stash + 0.9 * one_row) / 2**30)


def test_progress_counts_rows_and_tokens():
    heard = []
    r = answer([2, 4, 6], heard, waves_per_call=1)
    assert [p.rows_done for p in heard] == [1, 2, 3]
    assert [p.committed for p in heard] == [6, 10, 12]
    assert [p.waves for p in heard] == [1, 2, 3]
    assert {(p.rows_total, p.corrections) for p in heard} == {(3, 0)}
    assert int(r.counters.waves) == 3


def test_j12_the_loop_ends_when_the_last_row_does():
    r = answer([2, 5, 9], block_size=4, response_length=64)
    assert r.length.tolist() == [2, 5, 9]
    assert r.finished.all()
    assert int(r.counters.waves) == 3
    assert int(r.counters.row_waves) == 1 + 2 + 3
    for tokens, n in zip(np.asarray(r.tokens), [2, 5, 9], strict=True):
        assert tokens.tolist() == [*range(1, n), END] + [0] * (64 - n)


def test_j12_without_a_row_to_answer_there_is_no_wave():
    _, spec = loop_of()
    batch, sizes = prompts_of([[1], [1]]), Sizes(2, 2, 2, 2)
    model, table = lookup_model(V, 1), jnp.zeros(((V + 1) * 2, V))
    state = allocate((model,), spec, STUDENT_FIELDS, batch, sizes)
    nobody = make_queue(batch, 2).replace(num_rows=np.int32(0))
    run = functools.partial(advance, (model,), functools.partial(counting_wave, 2), spec, sizes)
    state, report = jax.jit(run)(state, (table,), batch, nobody, KEY, jnp.float32(0))
    assert report.tolist() == [0] * 6
    assert int(state.tally.waves) == 0
