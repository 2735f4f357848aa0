"""The runs of a comparison: every method with every seed, each in a process of its own."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class RunError(RuntimeError):
    """A run ended with an error; the message says what it printed last and where the rest is."""


@dataclass(frozen=True)
class Plan:
    """What is run. Methods differ in the method alone: seeds, prompts, steps and optimiser are one.

    Attributes:
      config: file of the configuration, which takes the method behind a colon.
      methods: rows of `train.baselines.METHODS`.
      seeds: of the training, the same for every method.
      workdir: where all runs and the compiled programs lie.
      overrides: ``--config.key=value``, for every run alike.
    """

    config: Path
    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    workdir: Path
    overrides: tuple[str, ...] = ()

    def folder(self, method: str, seed: int) -> Path:
        """The folder of a run."""
        return self.workdir / "runs" / f"{method}-{seed}"

    def pairs(self) -> Iterator[tuple[str, int]]:
        """All runs, seed by seed, so that what is there early is a comparison of fewer seeds."""
        return ((method, seed) for seed in self.seeds for method in self.methods)

    def command(self, method: str, seed: int) -> list[str]:
        """What trains one run; again, it continues the run."""
        return [
            *(sys.executable, "-m", "saki_jax.train", f"--config={self.config}:{method}"),
            *(f"--config.seed={seed}", *self.overrides),
            f"--workdir={self.folder(method, seed)}",
        ]


def run_all(plan: Plan, jobs: int) -> None:
    """Makes the runs that have no summary.json yet, `jobs` at a time.

    Raises:
      RunError: a run ended with an error. Runs that had begun are finished first, and the same
        call goes on with what is left.
    """
    left = [pair for pair in plan.pairs() if not is_finished(plan, *pair)]
    failed = threading.Event()

    def one(pair: tuple[str, int]) -> str | None:
        if failed.is_set():
            return None
        error = _run(plan, *pair)
        if error:
            failed.set()
        else:
            done = sum(is_finished(plan, *each) for each in plan.pairs())
            print(f"{pair[0]}, seed {pair[1]}: {done} runs are finished", flush=True)
        return error

    with ThreadPoolExecutor(jobs) as pool:
        errors = [error for error in pool.map(one, left) if error]
    if errors:
        raise RunError("\n".join(errors))


def is_finished(plan: Plan, method: str, seed: int) -> bool:
    """Whether the run has nothing left to do."""
    return (plan.folder(method, seed) / "summary.json").exists()


def _run(plan: Plan, method: str, seed: int) -> str | None:
    """Trains; what went wrong, or None."""
    log = plan.workdir / "logs" / f"{method}-{seed}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "a", encoding="utf-8") as file:
        done = subprocess.run(
            plan.command(method, seed),
            stdout=file,
            stderr=subprocess.STDOUT,
            env=_environment(plan.workdir),
            check=False,
        )
    if done.returncode == 0:
        return None
    last = "\n".join(log.read_text("utf-8").splitlines()[-5:])
    return f"{method}, seed {seed} ended with status {done.returncode} ({log}):\n{last}"


def _environment(workdir: Path) -> dict[str, str]:
    """All runs share what is compiled: compiling takes a third of the time of a short run."""
    shared = {
        "JAX_COMPILATION_CACHE_DIR": str((workdir / "compiled").absolute()),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
    }
    return shared | dict(os.environ)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]
