"""Mean@k and Pass@k."""

import itertools

import numpy as np
import pytest

from saki_jax.evals.score import counts_by_problem, mean_at_k, mean_pass_at_k, pass_at_k


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [(8, 0, 8, 0.0), (8, 3, 8, 1.0), (8, 1, 4, 0.5), (8, 2, 4, 0.785714), (8, 3, 1, 0.375)],
)
def test_m10_table(n, c, k, expected):
    assert pass_at_k(n, c, k) == pytest.approx(expected, abs=1e-6)


def test_m10_equals_the_share_of_all_subsets():
    for n, c, k in itertools.product(range(1, 7), range(7), range(1, 7)):
        if c <= n and k <= n:
            subsets = list(itertools.combinations([1] * c + [0] * (n - c), k))
            assert pass_at_k(n, c, k) == pytest.approx(np.mean([max(s) for s in subsets]))


@pytest.mark.parametrize(("n", "c", "k"), [(4, 1, 8), (8, 9, 8), (8, -1, 8), (8, 1, 0), (0, 0, 1)])
def test_m10_impossible_counts_are_refused(n, c, k):
    with pytest.raises(ValueError, match="sample"):
        pass_at_k(n, c, k)


def test_m10_two_problems():
    counts = counts_by_problem(["a"] * 8 + ["b"] * 8, [True] * 3 + [False] * 13)
    assert counts == {"a": (8, 3), "b": (8, 0)}
    assert mean_at_k(counts) == 0.1875
    assert mean_pass_at_k(counts, 8) == 0.5


def test_d07_the_order_of_rows_does_not_matter():
    ids = np.repeat([f"same beginning {n}" for n in range(10)], 2)
    correct = np.random.default_rng(0).random(20) < 0.4
    counts = counts_by_problem(ids, correct)
    for seed in range(5):
        order = np.random.default_rng(seed).permutation(20)
        shuffled = counts_by_problem(ids[order], correct[order])
        assert shuffled == counts
        assert mean_at_k(shuffled) == mean_at_k(counts)
        assert mean_pass_at_k(shuffled, 2) == mean_pass_at_k(counts, 2)


def test_problems_count_alike_whatever_their_samples():
    assert mean_at_k({"a": (2, 2), "b": (8, 0)}) == 0.5


def test_nothing_to_average_is_refused():
    with pytest.raises(ValueError, match="no problem"):
        mean_at_k({})
    with pytest.raises(ValueError, match="2 ids for 1 verdicts"):
        counts_by_problem(["a", "b"], [True])
