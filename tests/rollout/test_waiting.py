"""The queue: every row once, rows of one prompt together, longest first."""

import jax
import numpy as np
import pytest

from saki_jax.rollout.waiting import make_queue
from toys import prompts_of


def test_rows_share_a_prompt_when_their_valid_tokens_are_equal_wherever_they_stand():
    texts = [[1, 2], [3], [1, 2], [1, 2, 3], [3], [1, 2]]
    batch = prompts_of(texts, width=4)
    tokens = np.array(batch.tokens)
    tokens[2, 2:] = 77  # padding is no part of a prompt
    queue = make_queue(batch.replace(tokens=tokens), 8)
    assert int(queue.num_rows) == 6
    assert int(queue.num_prompts) == 3
    assert queue.row[:6].tolist() == [3, 0, 2, 5, 1, 4]
    assert queue.prompt[:6].tolist() == [0, 1, 1, 1, 2, 2]
    assert [texts[row] for row in queue.source[:3]] == [[1, 2, 3], [1, 2], [3]]
    assert {len(x) for x in (queue.row, queue.prompt, queue.source)} == {8}


@pytest.mark.parametrize("seed", range(5))
def test_every_row_waits_once_and_knows_its_prompt(seed):
    rng = np.random.default_rng(seed)
    texts = [rng.integers(0, 3, rng.integers(1, 4)).tolist() for _ in range(40)]
    batch = prompts_of(texts)
    queue = make_queue(jax.tree.map(np.asarray, batch), 40)
    assert sorted(queue.row.tolist()) == list(range(40))
    assert int(queue.num_prompts) == len(set(map(tuple, texts)))
    assert set(np.diff(queue.prompt).tolist()) == {0, 1}
    for row, prompt in zip(queue.row, queue.prompt, strict=True):
        assert texts[queue.source[prompt]] == texts[row]
    assert (np.diff([len(texts[row]) for row in queue.row]) <= 0).all()
