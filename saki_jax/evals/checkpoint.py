"""A model to be measured: a Hugging Face folder, or a checkpoint in the folder of a training run.

A run's checkpoints (Orbax) hold weights, moments and counters; only the weights are read. What the
model is and how it is spoken to (architecture, tokenizer, end ids) comes from the initial student's
folder, which the run's config.json names.
"""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from saki_jax.models import hf
from saki_jax.models import tokenizer as tokenizers
from saki_jax.models.config import PRESETS, Qwen3Config
from saki_jax.models.lm import LanguageModel
from saki_jax.models.parameters import describe, lookup, nest
from saki_jax.models.qwen3 import language_model
from saki_jax.models.sharding import param_shardings
from saki_jax.models.tokenizer import Tokenizer
from saki_jax.models.unused_rows import mask_unused_rows

CHECKPOINTS = "checkpoints"  # in a run's folder; inside, a folder for each step
SIZES = "sizes.json"  # written last: a step without it is torn


class SubjectError(ValueError):
    """There is no model to measure under this path; the message says what was looked for."""


@dataclass(frozen=True)
class Source:
    """Where weights come from, told from files alone.

    Attributes:
      folder: with config.json and tokenizer of the model.
      step_folder: the Orbax checkpoint, None for a Hugging Face folder.
      end_folders: folders that name the end ids.
      identity: path, step (None for a folder), method, student's size.
      hashed: files whose content names the weights.
      run_config: settings of the run, dotted names; {} for a Hugging Face folder.
    """

    folder: Path
    step_folder: Path | None
    end_folders: tuple[Path, ...]
    identity: dict[str, Any]
    hashed: tuple[Path, ...]
    run_config: dict[str, Any]

    def identify(self) -> dict[str, Any]:
        """What is written into results: the identity and a hash of the weights (reads them)."""
        return self.identity | {"weights": _hash_files(self.hashed)}


@dataclass(frozen=True)
class Subject:
    """A loaded model.

    Attributes:
      config: its shape.
      model: as pure functions.
      masked: ids beyond the tokenizer have probability 0 in it.
      params: in the compute dtype.
      tokenizer: of its folder.
      end_ids: what ends a response.
      source: see `Source`.
    """

    config: Qwen3Config
    model: LanguageModel
    masked: bool
    params: Any
    tokenizer: Tokenizer
    end_ids: tuple[int, ...]
    source: Source


def find(path: str | Path, *, step: int = 0) -> Source:
    """Looks at a path without loading anything.

    Args:
      path: a Hugging Face folder, a run's folder, or ``RUN/checkpoints/STEP``.
      step: of a run's checkpoints; 0 = the newest complete one.

    Raises:
      SubjectError: when it is neither, or the step is not there.
    """
    path = Path(path)
    if path.parent.name == CHECKPOINTS and path.name.isdigit():
        path, step = path.parent.parent, int(path.name)
    config = _read_json(path / "config.json")
    if (path / CHECKPOINTS).is_dir() and "student" in config:
        return _run(path, config, step)
    if step:
        raise SubjectError(f"a step is given ({step}), but {path} is not the folder of a run")
    if "model_type" not in config:
        raise SubjectError(
            f"{path} is neither a Hugging Face folder (a config.json with model_type) nor the "
            f"folder of a run (a config.json with student, and {CHECKPOINTS}/)"
        )
    identity = {
        "checkpoint": str(path),
        "step": None,
        "method": path.resolve().name,
        "student": size_label(hf.read_config(path)),
    }
    return Source(path, None, (path,), identity, tuple(sorted(path.glob("*.safetensors"))), {})


def load(
    source: Source,
    *,
    end_ids: Sequence[int] = (),
    dtype: Any = jnp.float32,
    mesh: jax.sharding.Mesh | None = None,
    masked: bool = False,
) -> Subject:
    """Loads what `find` found.

    Args:
      source: see `find`.
      end_ids: what ends a response; () = what the run used, or what the folder names.
      dtype: of weights and forward passes, as in the run's own rollouts.
      mesh: where the weights lie.
      masked: give ids beyond the tokenizer probability 0; a run that was trained so is read so.
    """
    config = hf.read_config(source.folder)
    if source.step_folder is None:
        _, params = hf.load(source.folder, dtype=dtype, mesh=mesh)
    else:
        params = _restore(source.step_folder, config, dtype, mesh)
    configured = end_ids or source.run_config.get("rollout.end_ids", ())
    tokenizer, model = tokenizers.load(source.folder), language_model(config, dtype)
    masked = masked or source.run_config.get("mask_unused_rows", False)
    return Subject(
        config=config,
        model=mask_unused_rows(model, tokenizer.size) if masked else model,
        masked=masked,
        params=params,
        tokenizer=tokenizer,
        end_ids=tokenizers.end_ids(source.end_folders, configured),
        source=source,
    )


def size_label(config: Qwen3Config) -> str:
    """What tables call a model of this shape: a preset's name, else its number of parameters.

    >>> size_label(PRESETS["1.7b"]), size_label(PRESETS["tiny"])[-1]
    ('1.7B', 'k')
    """
    for name, preset in PRESETS.items():
        if name[0].isdigit() and config == preset:
            return name.upper()
    count = sum(math.prod(parameter.shape) for parameter in describe(config))
    scale, unit = next((s, u) for s, u in ((1e9, "B"), (1e6, "M"), (1e3, "k")) if count >= s)
    return f"{count / scale:.3g}{unit}"


def _run(path: Path, config: dict, step: int) -> Source:
    complete = [s for s in _steps(path) if _is_complete(path / CHECKPOINTS / str(s))]
    if not complete:
        raise SubjectError(f"{path / CHECKPOINTS} holds no complete checkpoint")
    if step and step not in complete:
        raise SubjectError(f"{path} has no complete checkpoint of step {step}, only of {complete}")
    step = step or complete[-1]
    student = _folder_of(path, config, "student")
    ends = (student,)
    if config["teacher"] and not config.get("rollout.end_ids"):
        ends = (student, _folder_of(path, config, "teacher"))
    step_folder = path / CHECKPOINTS / str(step)
    identity = {
        "checkpoint": str(path),
        "step": step,
        "method": config["method"],
        "student": size_label(hf.read_config(student)),
    }
    # File names of Orbax are random, so the list of them names the weights.
    return Source(student, step_folder, ends, identity, (step_folder / SIZES,), config)


def _folder_of(path: Path, config: dict, key: str) -> Path:
    folder = Path(config[key])
    if not folder.is_dir():
        raise SubjectError(
            f"the run {path} was made with {key}={folder}, which is not there now (relative paths "
            "are looked for from the working directory)"
        )
    return folder


def _steps(path: Path) -> list[int]:
    return sorted(int(p.name) for p in (path / CHECKPOINTS).iterdir() if p.name.isdigit())


def _is_complete(step_folder: Path) -> bool:
    if not (step_folder / SIZES).is_file():
        return False
    sizes = json.loads((step_folder / SIZES).read_text("utf-8"))
    files = ((step_folder / name, size) for name, size in sizes.items())
    return all(file.is_file() and file.stat().st_size == size for file, size in files)


def _restore(
    step_folder: Path, config: Qwen3Config, dtype: Any, mesh: jax.sharding.Mesh | None
) -> Any:
    """The weights of a train state, cast while they are read; moments stay on disk."""
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shardings = None if mesh is None else param_shardings(mesh, config)
    wanted = nest(
        {
            parameter.path: jax.ShapeDtypeStruct(
                parameter.shape,
                jnp.dtype(dtype),
                sharding=one if shardings is None else lookup(shardings, parameter.path),
            )
            for parameter in describe(config)
        }
    )
    item = {"params": wanted}
    arguments = ocp.args.PyTreeRestore(
        item=item,
        restore_args=ocp.checkpoint_utils.construct_restore_args(item),
        partial_restore=True,
    )
    with ocp.PyTreeCheckpointer() as reader:
        return reader.restore((step_folder / "state").absolute(), args=arguments)["params"]


def _hash_files(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        with open(file, "rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()[:16]


def _read_json(file: Path) -> dict:
    if not file.is_file():
        raise SubjectError(
            f"{file} is missing; expected the folder of a model in Hugging Face format or the "
            "folder of a training run"
        )
    try:
        return json.loads(file.read_text("utf-8"))
    except json.JSONDecodeError as error:
        raise SubjectError(f"{file} is not JSON ({error})") from error
