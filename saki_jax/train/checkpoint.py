"""States to go on from, through Orbax: written whole, checked before they are trusted.

A checkpoint of step n holds the train state (masters, moments, counters) and a JSON record: step,
seed (all keys follow from seed and step), the position in the data. Beside the files of each
checkpoint lies a list of their sizes, written last: a checkpoint with a file missing or short is
torn and never restored.
"""

import json
import logging
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from saki_jax.train.state import TrainState

log = logging.getLogger(__name__)

_SIZES = "sizes.json"
_TORN = "torn"
_TEMPORARY = ".orbax-checkpoint-tmp"


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or restored; the message names the folder."""


class Checkpoints:
    """The checkpoints of one run.

    Args:
      folder: where they lie; made if it is not there.
      keep: the newest so many stay.
      keep_steps: these stay for ever.
    """

    def __init__(self, folder: str | os.PathLike, *, keep: int, keep_steps: Sequence[int] = ()):
        self.folder = Path(folder).absolute()
        self._remove_debris()
        policies = ocp.checkpoint_managers
        self._manager = ocp.CheckpointManager(
            self.folder,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=policies.AnyPreservationPolicy(
                    [policies.LatestN(keep), policies.CustomSteps(tuple(keep_steps))]
                ),
                enable_async_checkpointing=False,
                create=True,
            ),
            item_handlers={
                "state": ocp.StandardCheckpointHandler(),
                "record": ocp.JsonCheckpointHandler(),
            },
        )

    def _remove_debris(self) -> None:
        """What a save that was killed left behind. Done here, because Orbax removes it in a thread
        that can meet the next save of the same step.
        """
        if jax.process_index() == 0:
            for debris in self.folder.glob(f"*{_TEMPORARY}*"):
                log.warning("removing %s, which a save that was cut short left behind", debris)
                shutil.rmtree(debris)

    def save(self, step: int, state: TrainState, record: dict[str, Any]) -> None:
        """Writes the checkpoint of `step`.

        Raises:
          CheckpointError: Orbax did not write it (a newer one exists, or the same).
        """
        written = self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state), record=ocp.args.JsonSave(record)
            ),
        )
        if not written:
            raise CheckpointError(
                f"the checkpoint of step {step} was not written to {self.folder}, which holds the "
                f"steps {self.steps()}; a run that goes back must start from the newest of them"
            )
        if jax.process_index() == 0:
            _write_sizes(self.folder / str(step))

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, rising."""
        return sorted(self._manager.all_steps())

    def restore(self, template: TrainState) -> tuple[TrainState, dict[str, Any]] | None:
        """(state, record) of the newest complete checkpoint, or None where there is none at all.

        Args:
          template: shapes, dtypes and shardings of the running program, which the result has.

        Torn checkpoints are said to be so, and set aside in a folder ``...-torn`` beside this one.

        Raises:
          CheckpointError: all checkpoints are torn, or the newest sound one holds other arrays
            than `template` (the first that differs is named).
        """
        torn = []
        for step in reversed(self.steps()):
            fault = _torn(self.folder / str(step))
            if fault is None:
                return self._restore(step, template, torn)
            log.warning("checkpoint %s is torn (%s)", self.folder / str(step), fault)
            torn.append(step)
        if torn:
            raise CheckpointError(
                f"every checkpoint of {self.folder} is torn (steps {sorted(torn)}); start again "
                "with another --workdir, or bring back the missing files"
            )
        return None

    def reload(self) -> None:
        """Looks at the folder again, where something else has changed it."""
        self._manager.reload()

    def close(self) -> None:
        """Ends Orbax's threads."""
        self._manager.close()

    def _restore(
        self, step: int, template: TrainState, torn: list[int]
    ) -> tuple[TrainState, dict[str, Any]]:
        if torn:
            log.warning("going on from step %d, the newest complete checkpoint", step)
            self._set_aside(torn)
        stored = self._manager.item_metadata(step)["state"].tree
        _check_same_arrays(self.folder / str(step), stored, template)
        restored = self._manager.restore(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardRestore(template), record=ocp.args.JsonRestore()
            ),
        )
        return restored["state"], restored["record"]

    def _set_aside(self, steps: list[int]) -> None:
        # Left in place, they would make Orbax refuse to save these steps again.
        if jax.process_index() == 0:
            for step in steps:
                target = self.folder.with_name(f"{self.folder.name}-{_TORN}") / str(step)
                while target.exists():
                    target = target.with_name(target.name + "-again")
                target.parent.mkdir(exist_ok=True)
                os.rename(self.folder / str(step), target)
        self.reload()


def _files(checkpoint: Path) -> dict[str, int]:
    return {
        str(path.relative_to(checkpoint)): path.stat().st_size
        for path in sorted(checkpoint.rglob("*"))
        if path.is_file() and path.name != _SIZES
    }


def _write_sizes(checkpoint: Path) -> None:
    partial = checkpoint / (_SIZES + ".partial")
    partial.write_text(json.dumps(_files(checkpoint)))
    os.replace(partial, checkpoint / _SIZES)


def _torn(checkpoint: Path) -> str | None:
    """What is wrong with the files of a checkpoint, if anything is."""
    if not (checkpoint / _SIZES).exists():
        return f"{_SIZES} is missing, so it was not written to its end"
    expected, found = json.loads((checkpoint / _SIZES).read_text()), _files(checkpoint)
    for name, size in expected.items():
        if name not in found:
            return f"{name} is missing"
        if found[name] != size:
            return f"{name} has {found[name]} bytes of {size}"
    return None


def _check_same_arrays(checkpoint: Path, stored: Any, template: TrainState) -> None:
    """Refuses any difference, naming the array: Orbax would cast a wrong dtype in silence."""

    def describe(tree: Any) -> dict[str, str]:
        leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
        return {
            jax.tree_util.keystr(path, simple=True, separator="."): (
                f"{jax.numpy.dtype(leaf.dtype).name}{list(leaf.shape)}"
            )
            for path, leaf in leaves
        }

    there, here = describe(stored), describe(template)
    for name in [*here, *(there.keys() - here.keys())]:
        if there.get(name) != here.get(name):
            raise CheckpointError(
                f"{checkpoint} does not fit this run: {name} is {there.get(name, 'missing')} there "
                f"and {here.get(name, 'missing')} here; was the model or its dtype changed?"
            )
