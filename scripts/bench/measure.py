"""Interleaved timing, and the epsilon that gives the correction rate wanted."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import numpy as np

from bench.contenders import Contender
from saki_jax.rollout.batch import Prompts, Rollout


class Sample(NamedTuple):
    """One timed run."""

    seconds: float
    committed: int
    waves: int
    row_waves: int
    corrections: int
    complete: bool  # False: stopped when its time was over
    prefilled: int = 0  # prompts


class OutOfTime(Exception):
    """Leaves a contender between two of its blocks; carries the progress so far."""

    def __init__(self, progress):
        super().__init__("out of time")
        self.progress = progress


def sample(run: Callable[..., Rollout], limit: float) -> tuple[Sample, Rollout | None]:
    """Runs once. ``run`` takes a progress callback; past ``limit`` seconds it is stopped there."""
    began = time.perf_counter()

    def watch(progress):
        if time.perf_counter() - began > limit:
            raise OutOfTime(progress)

    try:
        rollout = jax.block_until_ready(run(watch if np.isfinite(limit) else None))
    except OutOfTime as stop:
        seconds, progress = time.perf_counter() - began, stop.progress
        cut = Sample(seconds, progress.committed, progress.waves, 0, progress.corrections, False)
        return cut, None
    seconds = time.perf_counter() - began
    counters = rollout.counters
    return Sample(
        seconds=seconds,
        committed=int(counters.committed),
        waves=int(counters.waves),
        row_waves=int(counters.row_waves),
        corrections=int(np.asarray(rollout.corrected).sum()),
        complete=True,
        prefilled=int(counters.prefilled),
    ), rollout


def interleave(tasks: Mapping[str, Callable[[], None]], repeats: int) -> None:
    """Runs all tasks ``repeats`` times in turn, each round beginning with another one.

    What disturbs the machine for a while then meets every contender alike.
    """
    names = list(tasks)
    for repeat in range(repeats):
        shift = repeat % len(names)
        for name in names[shift:] + names[:shift]:
            tasks[name]()


def calibrate(
    engine: Contender, prompts: Prompts, key: jax.Array, target: float, rounds: int = 8
) -> tuple[float, Rollout]:
    """An epsilon at which the engine corrects about ``target`` of the tokens, and that rollout.

    The rate goes about as the root of epsilon (Pinsker); stops within a tenth of the target, else
    at the nearest of ``rounds`` trials.
    """
    epsilon, best = 3.0 * target**2, None
    for _ in range(rounds):
        rollout = engine(prompts, epsilon, key, None)
        rate = float(np.asarray(rollout.corrected).sum() / np.asarray(rollout.length).sum())
        if best is None or abs(rate - target) < abs(best[1] - target):
            best = epsilon, rate, rollout
        if abs(rate - target) <= 0.1 * target:
            break
        # Half of the step in log epsilon: the rate of one trajectory is a noisy figure.
        epsilon *= float(np.clip(target / max(rate, 1e-4), 0.5, 2.0))
    return best[0], best[2]


def middle(values: list[float]) -> dict[str, float]:
    """Median and range of repeated measurements."""
    return {
        "median": statistics.median(values),
        "lowest": min(values),
        "highest": max(values),
    }
