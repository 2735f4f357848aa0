"""Which files of a checkpoint folder count, and what they say they hold."""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from saki_jax.models.config import ConfigError, Qwen3Config
from saki_jax.models.safetensors_file import (
    FileProblem,
    StoredTensor,
    is_lfs_pointer,
    lfs_problem,
    read_header,
)

log = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclass
class Found:
    """What a folder's weight files hold.

    Attributes:
      source: the file that lists the tensors: the index, or the single file.
      tensors: by name.
      unread: names that the index places in files which could not be read.
    """

    source: Path
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    unread: set[str] = field(default_factory=set)


def find_config(folder: Path, problems: list[str]) -> Qwen3Config | None:
    """The model configuration, or None after a noted problem."""
    if not folder.is_dir():
        problems.append(
            f"{folder} is not a folder; give a local checkpoint folder (nothing is downloaded)"
        )
        return None
    raw = read_json(folder / "config.json", problems)
    if raw is None:
        return None
    try:
        return Qwen3Config.from_hf(raw)
    except ConfigError as error:
        problems += [f"{folder / 'config.json'}: {problem}" for problem in error.problems]
        return None


def read_json(file: Path, problems: list[str]) -> dict | None:
    """A JSON object, or None after a noted problem."""
    if not file.is_file():
        problems.append(f"{file} is missing; download the whole folder")
        return None
    if is_lfs_pointer(file):
        problems.append(lfs_problem(file))
        return None
    try:
        value = json.loads(file.read_text("utf-8"))
    except ValueError as error:
        problems.append(f"{file} is not readable as JSON ({error}); download it again")
        return None
    if not isinstance(value, dict):
        problems.append(f"{file} holds a {type(value).__name__}, not a JSON object")
        return None
    return value


def find_tensors(folder: Path, problems: list[str]) -> Found | None:
    """The tensors of the files that the index names, or of the single file; no other is read.

    None when there is nothing to hold against the model; the reason is among the problems.
    """
    if (folder / INDEX).is_file():
        owners = _weight_map(folder / INDEX, problems)
        if owners is None:
            return None
        _log_strays(folder, set(owners.values()), "the index does not name it")
        found = Found(folder / INDEX)
        for name in sorted(set(owners.values())):
            owned = {tensor for tensor, owner in owners.items() if owner == name}
            try:
                found.tensors |= _owned(folder / name, owned, problems)
            except FileProblem as error:
                problems.append(str(error))
                found.unread |= owned
        return found
    if not (folder / SINGLE).is_file():
        there = sorted(f.name for f in folder.iterdir()) or ["nothing"]
        problems.append(
            f"{folder} holds neither {SINGLE} nor {INDEX} (it holds {', '.join(there)}); "
            "give a safetensors checkpoint"
        )
        return None
    _log_strays(folder, {SINGLE}, f"without an index only {SINGLE} is read")
    try:
        return Found(folder / SINGLE, read_header(folder / SINGLE))
    except FileProblem as error:
        problems.append(str(error))
        return None


def _weight_map(index: Path, problems: list[str]) -> Mapping[str, str] | None:
    """Tensor name -> file name, or None after a noted problem."""
    raw = read_json(index, problems)
    if raw is None:
        return None
    owners = raw.get("weight_map")
    if not isinstance(owners, dict) or not owners:
        problems.append(f"{index} has no weight_map of tensor to file names; download it again")
        return None
    odd = sorted({str(v) for v in owners.values() if not isinstance(v, str) or Path(v).name != v})
    if odd:
        problems.append(f"{index} names {odd}, which are not plain file names in its folder")
        return None
    return owners


def _log_strays(folder: Path, read: set[str], reason: str) -> None:
    for stray in sorted({f.name for f in folder.glob("*.safetensors")} - read):
        log.warning("%s is ignored: %s", folder / stray, reason)


def _owned(file: Path, owned: set[str], problems: list[str]) -> dict[str, StoredTensor]:
    """The tensors of one shard that the index assigns to it."""
    held = read_header(file)
    problems += [
        f"{file} lacks tensor {tensor}, which {INDEX} says is in it; "
        "index and shard do not belong together, download both again"
        for tensor in sorted(owned - held.keys())
    ]
    if foreign := sorted(held.keys() - owned):
        log.warning("%s: ignored, as the index does not place them there: %s", file, foreign)
    return {name: tensor for name, tensor in held.items() if name in owned}
