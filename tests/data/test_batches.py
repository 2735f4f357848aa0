"""Batches: a pure function of (seed, step), whole epochs, exact position."""

import json
import logging
import subprocess
import sys

import numpy as np
import pytest

from saki_jax.data.batches import PromptBatches, sample_rows
from saki_jax.data.prompts import DataError, Problem
from saki_jax.data.template import EncodedPrompts


def encoded(rows, width=4):
    """Row n holds the id n and has a length of its own."""
    problems = tuple(Problem(f"p{n}", f"q{n}", "1", "s") for n in range(rows))
    tokens = np.repeat(np.arange(rows, dtype=np.int32)[:, None], width, axis=1)
    return EncodedPrompts(problems, tokens, (1 + np.arange(rows) % width).astype(np.int32))


def indices(batches, steps):
    return [batches.at(step).index.tolist() for step in steps]


def test_a_batch_holds_the_same_rows_in_all_its_parts():
    batch = PromptBatches(encoded(20), prompts_per_step=6, seed=0).at(2)
    assert [p.id for p in batch.problems] == [f"p{i}" for i in batch.index]
    assert batch.tokens[:, 0].tolist() == batch.index.tolist()
    assert batch.length.tolist() == (1 + batch.index % 4).tolist()


def test_the_order_depends_on_the_seed_and_the_epoch_alone():
    one = PromptBatches(encoded(12), prompts_per_step=4, seed=3)
    again = PromptBatches(encoded(12), prompts_per_step=4, seed=3)
    other = PromptBatches(encoded(12), prompts_per_step=4, seed=4)
    steps = range(1, 10)
    assert indices(one, steps) == indices(again, reversed(steps))[::-1]
    assert indices(one, steps) != indices(other, steps)
    assert indices(one, [1, 2, 3]) != indices(one, [4, 5, 6])
    assert one.at(1).tokens.shape == one.at(9).tokens.shape


@pytest.mark.parametrize("epoch_end", ["wrap", "drop"])
def test_d06_every_step_is_full_and_no_row_comes_twice_in_an_epoch(epoch_end, caplog):
    with caplog.at_level(logging.INFO):
        batches = PromptBatches(encoded(17917, 1), prompts_per_step=64, seed=0, epoch_end=epoch_end)
    assert "279 full batches an epoch, 61 left over" in caplog.text
    assert ("dropped" if epoch_end == "drop" else "wrap into the next epoch") in caplog.text
    used = np.concatenate([batches.at(step).index for step in range(1, 201)])
    assert used.shape == (12800,)
    assert len(set(used.tolist())) == 12800
    first_epoch = np.concatenate([batches.at(step).index for step in range(1, 280)])
    assert len(set(first_epoch.tolist())) == 279 * 64
    last = batches.at(280).index
    left = set(range(17917)) - set(first_epoch.tolist())
    assert last.shape == (64,)
    assert (set(last[:61].tolist()) == left) is (epoch_end == "wrap")
    assert sample_rows(batches.at(280), 8).tokens.shape == (512, 1)


def test_the_position_can_be_saved_and_restored():
    batches = PromptBatches(encoded(10), prompts_per_step=4, seed=1)
    taken = [next(batches).index.tolist() for _ in range(3)]
    state = json.loads(json.dumps(batches.get_state()))
    rest = [next(batches).index.tolist() for _ in range(3)]
    again = PromptBatches(encoded(10), prompts_per_step=4, seed=1)
    again.set_state(state)
    assert [next(again).index.tolist() for _ in range(3)] == rest
    assert indices(again, [1, 2, 3]) == taken


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 2}, "seed: 1 then, 2 now"),
        ({"prompts_per_step": 5}, "prompts_per_step: 4 then, 5 now"),
        ({"epoch_end": "drop"}, "epoch_end: 'wrap' then, 'drop' now"),
        ({"rows": 11}, "prompts: "),
    ],
)
def test_a_position_in_another_order_is_refused(change, named):
    settings = {"rows": 10, "prompts_per_step": 4, "seed": 1}
    state = PromptBatches(encoded(10), prompts_per_step=4, seed=1).get_state()
    settings |= change
    other = PromptBatches(encoded(settings.pop("rows")), **settings)
    with pytest.raises(DataError, match=named):
        other.set_state(state)


def test_another_process_gets_the_same_batches():
    """What hosts share is the seed; nothing of a batch may come from the process (hash seeds)."""
    code = (
        "import sys; sys.path.insert(0, 'tests/data'); import test_batches as t;"
        "b = t.PromptBatches(t.encoded(30), prompts_per_step=7, seed=5);"
        "print([b.at(s).index.tolist() for s in range(1, 9)], b.get_state()['prompts'])"
    )
    there = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONHASHSEED": "1", "PYTHONPATH": ".", "JAX_PLATFORMS": "cpu"},
    ).stdout
    batches = PromptBatches(encoded(30), prompts_per_step=7, seed=5)
    here = f"{indices(batches, range(1, 9))} {batches.get_state()['prompts']}\n"
    assert there == here


def test_each_prompt_is_repeated_in_place():
    batch = PromptBatches(encoded(8), prompts_per_step=2, seed=0).at(1)
    rows = sample_rows(batch, 3)
    assert rows.tokens[:, 0].tolist() == np.repeat(batch.index, 3).tolist()
    assert rows.length.tolist() == np.repeat(batch.length, 3).tolist()
    assert rows.sequence_id.tolist() == list(range(6))


def test_too_few_prompts_and_wrong_settings_are_refused():
    with pytest.raises(DataError, match="3 prompts cannot fill a batch of 4"):
        PromptBatches(encoded(3), prompts_per_step=4, seed=0)
    with pytest.raises(ValueError, match="epoch_end is 'pad'"):
        PromptBatches(encoded(8), prompts_per_step=4, seed=0, epoch_end="pad")
    with pytest.raises(ValueError, match="steps count from 1, got 0"):
        PromptBatches(encoded(8), prompts_per_step=4, seed=0).at(0)
