"""Committing a block: the only place where a response is cut."""

import jax.numpy as jnp
import numpy as np
import pytest

from saki_jax.rollout.slots import Block, commit, empty_slots, record

END = 90
PAD = 0


def slots_at(count: list[int], length: list[int] | None = None):
    """Live rows with so many committed tokens and their pending token at `length`."""
    rows = len(count)
    return empty_slots(rows, rows).replace(
        row=jnp.arange(rows, dtype=jnp.int32),
        count=jnp.array(count, jnp.int32),
        length=jnp.array(count if length is None else length, jnp.int32),
        alive=jnp.ones(rows, bool),
    )


def block_of(tokens: list[list[int]], usable: list[int], nonfinite=None, corrected=None) -> Block:
    tokens = jnp.array(tokens, jnp.int32)
    no = jnp.zeros(tokens.shape, bool)
    return Block(
        events={
            "tokens": tokens,
            "corrected": no if corrected is None else jnp.array(corrected, bool),
        },
        usable=jnp.array(usable, jnp.int32),
        nonfinite=no if nonfinite is None else jnp.array(nonfinite, bool),
    )


def kept_tokens(slots, block, response_length=64, end_ids=(END,)):
    """Commits into blank arrays; returns the slots after it and what stands in the arrays."""
    after, kept = commit(slots, block, response_length=response_length, end_ids=end_ids)
    rows = slots.row.shape[0]
    table = {
        "tokens": jnp.full((rows, response_length), PAD, jnp.int32),
        "corrected": jnp.zeros((rows, response_length), bool),
    }
    table = record(table, block, slots, kept)
    return after, np.asarray(kept), {name: np.asarray(value) for name, value in table.items()}


def test_s08_a_rejection_at_the_last_place_commits_the_whole_block():
    after, kept, table = kept_tokens(slots_at([7]), block_of([[1, 2, 3, 4]], [4]))
    assert kept.tolist() == [4]
    assert (int(after.count[0]), int(after.length[0]), int(after.pending[0])) == (11, 11, 4)
    assert table["tokens"][0, 7:11].tolist() == [1, 2, 3, 4]


def test_s08_a_rejected_block_of_one_commits_its_correction():
    after, kept, _ = kept_tokens(slots_at([7]), block_of([[5]], [1]))
    assert (kept.tolist(), int(after.length[0]), int(after.pending[0])) == ([1], 8, 5)


def test_s09_each_row_advances_by_its_own_prefix():
    tokens = [[1, 2, 3, 4]] * 3
    after, kept, _ = kept_tokens(slots_at([0, 0, 0], [5, 9, 6]), block_of(tokens, [1, 3, 4]))
    assert kept.tolist() == [1, 3, 4]
    assert after.length.tolist() == [6, 12, 10]
    assert after.pending.tolist() == [1, 3, 4]


def test_s11_an_end_token_inside_the_block_ends_the_row_there():
    block = block_of([[11, 12, END, 14, 15]], [5])
    after, kept, table = kept_tokens(slots_at([0]), block, response_length=8)
    assert kept.tolist() == [3]
    assert bool(after.finished[0])
    assert not bool(after.alive[0])
    assert table["tokens"][0].tolist() == [11, 12, END, PAD, PAD, PAD, PAD, PAD]
    assert not table["corrected"].any()


def test_s12_an_end_token_behind_the_first_correction_does_not_count():
    # The proposal [11, END, 13] was rejected at its second place and replaced by 9.
    after, kept, table = kept_tokens(slots_at([0]), block_of([[11, 9, END]], [2]), 4)
    assert kept.tolist() == [2]
    assert not bool(after.finished[0])
    assert bool(after.alive[0])
    assert int(after.pending[0]) == 9
    assert table["tokens"][0].tolist() == [11, 9, PAD, PAD]


def test_s12_a_correction_may_be_the_end_token():
    corrected = [[False, True, False]]
    block = block_of([[11, END, 13]], [2], corrected=corrected)
    after, kept, table = kept_tokens(slots_at([0]), block, 4)
    assert kept.tolist() == [2]
    assert bool(after.finished[0])
    assert table["corrected"][0].tolist() == [False, True, False, False]


@pytest.mark.parametrize(("cap", "tokens", "finished"), [(5, 3, True), (2, 2, False), (3, 3, True)])
def test_s13_the_end_token_is_seen_before_the_cap(cap, tokens, finished):
    block = block_of([[10, 11, END, 20, 21, 22]], [6])
    after, kept, _ = kept_tokens(slots_at([0]), block, response_length=cap)
    assert kept.tolist() == [tokens]
    assert bool(after.finished[0]) is finished
    assert not bool(after.alive[0])


def test_the_cap_cuts_a_correction_like_anything_else():
    block = block_of([[1, 2, 3, 4]], [4], corrected=[[False, False, False, True]])
    after, kept, table = kept_tokens(slots_at([5]), block, response_length=7)
    assert kept.tolist() == [2]
    assert not table["corrected"].any()
    assert not bool(after.alive[0])
    assert not bool(after.finished[0])


def test_s16_a_slot_without_a_row_commits_nothing_whatever_it_holds():
    slots = slots_at([3, 3]).replace(alive=jnp.array([False, True]))
    block = block_of([[-1, END], [1, 2]], [2, 2], nonfinite=[[True, True], [False, False]])
    after, kept, table = kept_tokens(slots, block)
    assert kept.tolist() == [0, 2]
    assert not bool(after.finished[0])
    assert not bool(after.nonfinite[0])
    assert (table["tokens"][0] == PAD).all()
    for name in ("count", "length", "pending"):
        assert int(getattr(after, name)[0]) == int(getattr(slots, name)[0])


@pytest.mark.parametrize(
    ("bad_at", "kept_is", "flagged"), [(0, 0, True), (1, 1, True), (2, 2, False), (3, 2, False)]
)
def test_s17_a_row_stops_before_a_bad_position_only_if_it_would_be_committed(
    bad_at, kept_is, flagged
):
    bad = [[i == bad_at for i in range(4)], [False] * 4]
    block = block_of([[1, 2, 3, 4], [5, 6, 7, 8]], [2, 4], nonfinite=bad)
    after, kept, _ = kept_tokens(slots_at([0, 0]), block)
    assert kept.tolist() == [kept_is, 4]
    assert after.nonfinite.tolist() == [flagged, False]
    assert after.alive.tolist() == [not flagged, True]


def test_a_bad_position_is_not_read_as_an_end_token():
    block = block_of([[1, END, 2]], [3], nonfinite=[[False, True, False]])
    after, kept, _ = kept_tokens(slots_at([0]), block)
    assert kept.tolist() == [1]
    assert bool(after.nonfinite[0])
    assert not bool(after.finished[0])
