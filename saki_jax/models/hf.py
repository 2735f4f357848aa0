"""Hugging Face checkpoint folders: checked from their headers, then loaded tensor by tensor.

`save` writes one; it lives in `export` and is offered here beside `load`.
"""

import os
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from saki_jax.models.checkpoint_files import Found, find_config, find_tensors
from saki_jax.models.config import Qwen3Config
from saki_jax.models.export import save
from saki_jax.models.parameters import Parameter, describe, lookup, nest
from saki_jax.models.safetensors_file import DTYPES, StoredTensor
from saki_jax.models.sharding import param_shardings

__all__ = ["CheckpointError", "inspect", "load", "read_config", "save"]

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

_LISTED = 100  # problems of one kind that are written out
_BLOCK_ROWS = 4096  # rows of head and embedding compared at a time


class CheckpointError(ValueError):
    """A checkpoint folder that cannot be loaded; ``problems`` holds every reason found."""

    def __init__(self, folder: Path, problems: list[str]):
        super().__init__(f"{folder} cannot be loaded:\n" + "\n".join(f"- {p}" for p in problems))
        self.problems = problems


def load(
    path: str | os.PathLike, *, dtype: Any = jnp.float32, mesh: jax.sharding.Mesh | None = None
) -> tuple[Qwen3Config, dict]:
    """Reads a checkpoint folder into parameters of the wanted dtype, laid out on the mesh.

    Everything that the file headers can tell is checked before any weight is put on a device. Then
    the tensors come one after the other, each device reading its own rows, so that the host holds
    about one tensor more than what is kept.

    Args:
      path: a local folder: config.json, and model.safetensors or shards with their index.
      dtype: of the parameters. bfloat16 from bfloat16 files keeps every bit.
      mesh: lays the parameters out as `param_shardings` says; without one, the default device.

    Raises:
      CheckpointError: with every problem found, naming file and tensor and what to do.
      ValueError: the model does not fit the mesh (see `sharding.check_divides`).
    """
    config, tensors = inspect(path)
    shardings = None if mesh is None else param_shardings(mesh, config)
    params = {}
    for parameter in describe(config):
        sharding = None if shardings is None else lookup(shardings, parameter.path)
        tensor = tensors[parameter.hf_name]
        params[parameter.path] = _place(tensor, parameter, jnp.dtype(dtype), sharding)
    return config, nest(params)


def inspect(path: str | os.PathLike) -> tuple[Qwen3Config, dict[str, StoredTensor]]:
    """All checks of `load`, and where each tensor of the model lies. Touches no device.

    Raises:
      CheckpointError: with every problem found.
    """
    folder = Path(path)
    problems: list[str] = []
    config = find_config(folder, problems)
    found = find_tensors(folder, problems) if folder.is_dir() else None
    if config is not None and found is not None:
        problems += _mismatches(config, found)
    if problems:
        raise CheckpointError(folder, problems)
    return config, {p.hf_name: found.tensors[p.hf_name] for p in describe(config)}


def read_config(path: str | os.PathLike) -> Qwen3Config:
    """The model configuration of a checkpoint folder.

    Raises:
      CheckpointError: config.json is missing, not readable, or not a model we compute.
    """
    problems: list[str] = []
    config = find_config(Path(path), problems)
    if problems:
        raise CheckpointError(Path(path), problems)
    return config


def _mismatches(config: Qwen3Config, found: Found) -> list[str]:
    """Everything in which the files' tensors and the model's parameters differ."""
    expected = {p.hf_name: p for p in describe(config)}
    # Old Llama files store the rotary frequencies, which follow from the config.
    tensors = {n: t for n, t in found.tensors.items() if not n.endswith("rotary_emb.inv_freq")}
    missing = sorted(expected.keys() - tensors.keys() - found.unread)
    surplus = sorted(tensors.keys() - expected.keys())
    problems = []
    if HEAD in surplus and config.tie_word_embeddings:
        surplus.remove(HEAD)
        if EMBEDDING in tensors:
            problems += _head_differs(tensors[EMBEDDING], tensors[HEAD])
    prefix = _other_prefix(surplus)
    if prefix is not None and missing:
        problems.append(
            f"{found.source} names its tensors {prefix + 'norm.weight'!r} where "
            "'model.norm.weight' is expected; rename them (another wrapper saved this checkpoint)"
        )
    problems += _capped([_missing(found.source, expected[name]) for name in missing])
    problems += _capped([_unexpected(tensors[name], name, config) for name in surplus])
    for name in sorted(expected.keys() & tensors.keys()):
        problems += _unlike(tensors[name], expected[name])
    return problems


def _missing(source: Path, parameter: Parameter) -> str:
    text = f"{source} has no tensor {parameter.hf_name} of shape {parameter.hf_shape}"
    if parameter.hf_name == HEAD:
        return (
            f"{text}, though config.json says tie_word_embeddings = false (or leaves it out); "
            "set it to true if the embedding is the head, else get the complete checkpoint"
        )
    return f"{text}; the checkpoint is incomplete, or config.json is another model's"


def _unexpected(tensor: StoredTensor, name: str, config: Qwen3Config) -> str:
    text = f"{tensor.file} holds tensor {name}, which is not a part of the model"
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    if layer and int(layer[1]) >= config.num_layers:
        return f"{text}: config.json says num_hidden_layers = {config.num_layers}; correct one"
    kind = "Qwen3" if config.qk_norm else "Llama (no q/k norm)"
    return f"{text}; check that config.json ({kind}) belongs to this checkpoint"


def _unlike(tensor: StoredTensor, parameter: Parameter) -> list[str]:
    """Wrong dtype or shape of one tensor."""
    where = f"{tensor.file}: tensor {parameter.hf_name}"
    problems = []
    if tensor.dtype not in DTYPES:
        problems.append(
            f"{where} has dtype {tensor.dtype}; expected one of {', '.join(DTYPES)}: "
            "give an unquantised checkpoint"
        )
    if tensor.shape != parameter.hf_shape:
        problems.append(
            f"{where} has shape {tensor.shape}, config.json asks for {parameter.hf_shape}; "
            "the two do not belong together"
        )
    return problems


def _other_prefix(names: list[str]) -> str | None:
    """What stands in place of "model." if all surplus names agree on something else."""
    for name in names:
        prefix = name.removesuffix("norm.weight")
        if prefix != name and f"{prefix}embed_tokens.weight" in names:
            return prefix
    return None


def _capped(lines: list[str]) -> list[str]:
    more = len(lines) - _LISTED
    return lines if more <= 0 else [*lines[:_LISTED], f"... and {more} more of this kind"]


def _head_differs(embedding: StoredTensor, head: StoredTensor) -> list[str]:
    """A tied model's surplus head must equal the embedding; compared some rows at a time."""
    names = f"{head.file}: tensor {HEAD}"
    if head.dtype not in DTYPES or embedding.dtype not in DTYPES or head.shape != embedding.shape:
        return [
            f"{names} ({head.dtype} {head.shape}) cannot be the tied {EMBEDDING} "
            f"({embedding.dtype} {embedding.shape}); set tie_word_embeddings = false or remove it"
        ]
    largest = 0.0
    for row in range(0, head.shape[0], _BLOCK_ROWS):
        rows = (slice(row, row + _BLOCK_ROWS), slice(None))
        one, other = (t.read(rows, np.dtype(np.float32)) for t in (embedding, head))
        difference = np.abs(one - other)
        difference[(one == other) | (np.isnan(one) & np.isnan(other))] = 0.0
        largest = np.maximum(largest, difference.max())  # keeps a NaN
    if largest == 0.0:
        return []
    return [
        f"{names} differs from {EMBEDDING} by up to {largest:.6g}, though config.json says "
        "tie_word_embeddings = true; set it to false if the head is its own, or remove the tensor"
    ]


def _place(
    tensor: StoredTensor,
    parameter: Parameter,
    dtype: np.dtype,
    sharding: jax.sharding.Sharding | None,
) -> jax.Array:
    """One parameter on its devices; only the parts that local devices hold are read."""

    def part(index: tuple[slice, ...]) -> np.ndarray:
        stored = index[::-1] if parameter.transposed else index
        return tensor.read(stored, dtype, transposed=parameter.transposed)

    if sharding is None:
        return jnp.asarray(part((slice(None),) * len(parameter.shape)))
    read: dict[str, np.ndarray] = {}  # replicas of one part are read once

    def part_once(index: tuple[slice, ...]) -> np.ndarray:
        key = str(index)
        if key not in read:
            read[key] = part(index)
        return read[key]

    return jax.make_array_from_callback(parameter.shape, sharding, part_once)
