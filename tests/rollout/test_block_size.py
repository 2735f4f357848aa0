"""The choice of the block size: what a block commits, and for what cost."""

import numpy as np
import pytest

from saki_jax.rollout.block_size import best_block_size, expected_commit

SIZES = (1, 2, 4, 8, 16)
COSTS = tuple(k + 2.5 for k in SIZES)


@pytest.mark.parametrize("rate", [0.0, 1e-9, 0.03, 0.5, 1.0])
def test_what_a_block_commits_is_the_mean_of_its_law(rate):
    """Position j is committed when none of the j before it was corrected."""
    for size in SIZES:
        assert expected_commit(rate, size) == pytest.approx(((1 - rate) ** np.arange(size)).sum())


def test_more_corrections_never_ask_for_longer_blocks():
    best = [best_block_size(SIZES, COSTS, rate) for rate in np.linspace(0, 1, 50)]
    assert best[0] == 16
    assert best[-1] == 1
    assert (np.diff(best) <= 0).all()
    assert len(set(best)) == len(SIZES)


def test_the_choice_is_the_one_that_costs_least_a_token():
    for rate in (0.01, 0.03, 0.1, 0.3):
        per_token = [c / expected_commit(rate, k) for k, c in zip(SIZES, COSTS, strict=True)]
        assert best_block_size(SIZES, COSTS, rate) == SIZES[int(np.argmin(per_token))]
    assert best_block_size((8, 4), (8.0, 4.0), 0.0) == 4  # of equals the smaller
