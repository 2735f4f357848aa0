"""The KL budget epsilon as a function of the step (paper 3.2 and Table 5; METHODS section 5)."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

KINDS = ("linear", "constant", "cosine", "piecewise")


def epsilon_at(schedule: Mapping[str, Any], step: int) -> float:
    """epsilon of `step`, counted from 1; after annealing exactly 0.0, not a small number.

    The exact zero matters: it is what makes the host take the student-only program.

    Args:
      schedule: the `epsilon` part of a config, with the keys
        kind: "linear" falls from `start` at step 1 to 0 at step `zero_at`; "cosine" does so along
          half a cosine; "constant" stays at `start`; "piecewise" takes the value of the last of
          `points` ((first step, value), ...) whose first step has come.
        start, zero_at, points: as above; a key that the kind does not use is ignored.
      step: at least 1.

    Raises:
      ValueError: for a step below 1 or a schedule that `check_schedule` refuses.

    >>> linear = {"kind": "linear", "start": 0.02, "zero_at": 51}
    >>> [epsilon_at(linear, step) for step in (1, 26, 31, 51, 200)]
    [0.02, 0.01, 0.008, 0.0, 0.0]
    """
    check_schedule(schedule)
    if step < 1:
        raise ValueError(f"steps are counted from 1, but epsilon was asked for step {step}")
    kind = schedule["kind"]
    if kind == "constant":
        return float(schedule["start"])
    if kind == "piecewise":
        return [float(value) for first, value in schedule["points"] if first <= step][-1]
    start, zero_at = schedule["start"], schedule["zero_at"]
    if step >= zero_at:
        return 0.0
    if kind == "linear":
        return start * (zero_at - step) / (zero_at - 1)
    return start * 0.5 * (1 + math.cos(math.pi * (step - 1) / (zero_at - 1)))


def check_schedule(schedule: Mapping[str, Any]) -> None:
    """Raises ValueError, in words, for a schedule that does not say what epsilon is."""
    kind = schedule["kind"]
    if kind not in KINDS:
        raise ValueError(f"epsilon.kind is {kind!r}; it must be one of {', '.join(KINDS)}")
    if kind == "piecewise":
        _check_points(schedule["points"])
        return
    _check_budget("epsilon.start", schedule["start"])
    if kind != "constant" and schedule["zero_at"] < 2:
        raise ValueError(
            f"epsilon.zero_at is {schedule['zero_at']}: the first step at which epsilon is 0 must "
            "be 2 or later (for no guidance at all use method opd, or constant with start 0)"
        )


def _check_points(points: Sequence[tuple[int, float]]) -> None:
    firsts = [first for first, _ in points]
    if not firsts or firsts[0] != 1 or firsts != sorted(set(firsts)):
        raise ValueError(
            f"epsilon.points is {points!r}; it must be ((first step, value), ...) with rising "
            "steps, the first of them 1"
        )
    for _, value in points:
        _check_budget("epsilon.points", value)


def _check_budget(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name} contains {value!r}; a KL budget is a finite number of nats >= 0")
