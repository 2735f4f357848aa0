"""The folder of a run: what lies where, and who may go on in it.

    config.json      the configuration, written once
    metrics.jsonl    a JSON object a step
    evaluations/     what each evaluation found, with the responses
    probe/           what the fixed-prefix probe found
    checkpoints/     states to go on from
    tensorboard/     the metrics again
    evidence/        batches on which a run stopped
    summary.json     written at the very end: a folder that has it is finished

Nothing here is ever overwritten. What a continued run makes again (steps behind its checkpoint) is
set aside under another name first.
"""

import fcntl
import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

import jax
import numpy as np

from saki_jax.rollout.batch import Rollout
from saki_jax.train.config import ConfigError

_OURS = ("metrics.jsonl", "evaluations", "probe", "checkpoints", "summary.json")


class RunDir:
    """Paths of a run and the rules of the module's docstring."""

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        self.config = self.path / "config.json"
        self.metrics = self.path / "metrics.jsonl"
        self.summary = self.path / "summary.json"
        self.evaluations = self.path / "evaluations"
        self.probe = self.path / "probe"
        self.checkpoints = self.path / "checkpoints"
        self.tensorboard = self.path / "tensorboard"
        self.evidence = self.path / "evidence"
        self._lock: TextIO | None = None

    def claim(self, flat_config: dict[str, Any]) -> bool:
        """Takes the folder for a run of this configuration; True if it goes on with one.

        Raises:
          ConfigError: the folder holds a run of another configuration (the keys that differ are
            named), a run that another process is working on, or results without a config.json.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        if self.config.exists():
            self._check_same(flat_config)
        else:
            found = [name for name in _OURS if (self.path / name).exists()]
            if found:
                raise ConfigError(
                    f"{self.path} holds {', '.join(found)} but no config.json, so it cannot be "
                    "continued, and nothing is overwritten; choose another --workdir"
                )
        self._take_lock()
        return self.config.exists()

    def begin(self, flat_config: dict[str, Any]) -> None:
        """Marks the folder as a run of this configuration. Called when everything has loaded, so
        that a wrong path costs no folder.
        """
        if jax.process_index() == 0 and not self.config.exists():
            write_json(self.config, flat_config)

    def close(self) -> None:
        """Lets other processes have the folder."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def set_aside_after(self, step: int) -> int:
        """Moves away what was written for steps behind `step`; returns how many lines there were.

        A run that died between two checkpoints comes back to the older one and makes those steps
        again, so `metrics.jsonl` has one line a step and yet loses nothing.
        """
        moved = 0
        if self.metrics.exists():
            lines = self.metrics.read_text("utf-8").splitlines(keepends=True)
            kept = [line for line in lines if _step_of(line) <= step]
            moved = len(lines) - len(kept)
            if moved:
                os.rename(self.metrics, _free_name(self.metrics))
                _write_whole(self.metrics, "".join(kept))
        for file in sorted([*self.evaluations.glob("student_*"), *self.probe.glob("step_*")]):
            if int(file.name.split("_")[1].split(".")[0]) > step:
                os.rename(file, _free_name(file))
        return moved

    def read_metrics(self) -> list[dict[str, Any]]:
        """All lines of metrics.jsonl."""
        if not self.metrics.exists():
            return []
        return [json.loads(line) for line in self.metrics.read_text("utf-8").splitlines()]

    def _check_same(self, flat_config: dict[str, Any]) -> None:
        try:
            before = json.loads(self.config.read_text("utf-8"))
        except json.JSONDecodeError as error:
            raise ConfigError(
                f"{self.config} is not JSON ({error}); choose another --workdir"
            ) from error
        names = sorted(before.keys() | flat_config.keys())
        told = [
            f"  {name}: {_shown(before, name)} there, {_shown(flat_config, name)} now"
            for name in names
            if _shown(before, name) != _shown(flat_config, name)
        ]
        if told:
            raise ConfigError(
                f"{self.path} holds a run of another configuration:\n"
                + "\n".join(told)
                + "\nchoose another --workdir, or the same values"
            )

    def _take_lock(self) -> None:
        # The system lets go of it when the process dies, however it dies.
        self._lock = open(self.path / ".lock", "a")  # noqa: SIM115
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.close()
            raise ConfigError(
                f"another process is working in {self.path}; wait for it, or use another --workdir"
            ) from error


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON file that appears complete or not at all; numbers that are none become null.

    Raises:
      FileExistsError: the file is there already.
    """
    if path.exists():
        raise FileExistsError(f"{path} exists and is not overwritten")
    path.parent.mkdir(parents=True, exist_ok=True)
    _write_whole(path, json.dumps(as_json(value), indent=2, ensure_ascii=False) + "\n")


def write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Writes a JSON-lines file that appears complete or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _write_whole(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def write_evidence(folder: Path, rollout: Rollout, record: dict[str, Any]) -> Path:
    """The batch of a step as NumPy arrays and its figures as JSON; returns the arrays' path."""
    path = folder / f"step_{record['step']:06d}.npz"
    leaves, _ = jax.tree_util.tree_flatten_with_path(rollout)
    arrays = {
        jax.tree_util.keystr(where, simple=True, separator="."): np.asarray(leaf)
        for where, leaf in leaves
    }
    if jax.process_index() == 0:
        write_json(path.with_suffix(".json"), record)
        np.savez_compressed(path, **arrays)
    return path


def as_json(value: Any) -> Any:
    """`value` with null in place of NaN and infinities, which JSON does not know."""
    if isinstance(value, dict):
        return {key: as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _write_whole(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, "utf-8")
    os.replace(partial, path)


def _shown(flat: dict[str, Any], name: str) -> str:
    return json.dumps(as_json(flat[name])) if name in flat else "(no such key)"


def _step_of(line: str) -> int | float:
    """The step of a line; a torn last line counts as behind everything."""
    try:
        return json.loads(line)["step"]
    except json.JSONDecodeError:
        return math.inf


def _free_name(path: Path) -> Path:
    """`path` with ".superseded-1" (or -2, ...) behind its name."""
    number = 1
    while (free := path.with_name(f"{path.name}.superseded-{number}")).exists():
        number += 1
    return free
