"""Scores over samples, grouped by problem id. NumPy only."""

from collections.abc import Sequence
from math import comb

import numpy as np


def counts_by_problem(
    problem_ids: Sequence[str], correct: Sequence[bool]
) -> dict[str, tuple[int, int]]:
    """(samples, right samples) of each problem, whatever the order of the rows (case D07)."""
    if len(problem_ids) != len(correct):
        raise ValueError(f"{len(problem_ids)} ids for {len(correct)} verdicts")
    found: dict[str, tuple[int, int]] = {}
    for name, right in zip(problem_ids, correct, strict=True):
        n, c = found.get(name, (0, 0))
        found[name] = (n + 1, c + bool(right))
    return found


def mean_at_k(counts: dict[str, tuple[int, int]]) -> float:
    """Mean correctness over the samples, problems weighted equally (METHODS section 5).

    >>> mean_at_k({"a": (8, 3), "b": (8, 0)})
    0.1875
    """
    _refuse_empty(counts)
    return float(np.mean([c / n for n, c in counts.values()]))


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that k of n samples without replacement hold at least one of the c right ones.

    With k = n this is 1 exactly when c > 0, the plain definition that the paper uses.

    Raises:
      ValueError: unless 0 <= c <= n and 1 <= k <= n.
    """
    if not 0 <= c <= n:
        raise ValueError(f"{c} right samples of {n}")
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} needs at least {k} samples a problem, there are {n}")
    return 1.0 - comb(n - c, k) / comb(n, k)


def mean_pass_at_k(counts: dict[str, tuple[int, int]], k: int) -> float:
    """`pass_at_k` averaged over problems.

    >>> mean_pass_at_k({"a": (8, 3), "b": (8, 0)}, 8)
    0.5
    """
    _refuse_empty(counts)
    return float(np.mean([pass_at_k(n, c, k) for n, c in counts.values()]))


def _refuse_empty(counts: dict[str, tuple[int, int]]) -> None:
    if not counts:
        raise ValueError("no problem to average over")
