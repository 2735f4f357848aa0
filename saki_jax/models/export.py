"""Writes a folder that Hugging Face's transformers loads."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from saki_jax.models import safetensors_file
from saki_jax.models.config import Qwen3Config
from saki_jax.models.parameters import describe, lookup
from saki_jax.models.safetensors_file import NAMES

# What belongs to the tokenizer and to generation, and is taken over as it is.
COPIED = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def save(
    path: str | os.PathLike,
    config: Qwen3Config,
    params: Any,
    *,
    dtype: Any = jnp.bfloat16,
    tokenizer_from: str | os.PathLike | None = None,
) -> Path:
    """Writes config.json and model.safetensors, tensor by tensor, and appears all at once.

    The folder is made under a temporary name beside ``path`` and renamed when it is complete, so
    a crash leaves no half checkpoint under the name.

    Args:
      path: must not exist, or be an empty folder.
      config: of the model.
      params: its parameters. On several processes all must call; the first writes.
      dtype: bfloat16, float16 or float32.
      tokenizer_from: a checkpoint folder whose tokenizer, template and generation_config.json are
        copied, and whose config.json gives the special ids (bos, eos, pad).

    Returns:
      The folder.

    Raises:
      FileExistsError: the folder exists and is not empty; nothing is overwritten.
      ValueError: another dtype, parameters that do not belong to the config, or float16 that is
        too narrow for a value.
    """
    path, dtype = Path(path), np.dtype(dtype)
    if dtype not in NAMES:
        raise ValueError(f"cannot write {dtype}; choose one of {', '.join(map(str, NAMES))}")
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise FileExistsError(f"{path} exists and is not empty; choose another name or remove it")
    shapes = _checked_shapes(config, params)
    arrays = _arrays(config, params, dtype)
    if jax.process_index() != 0:
        for _ in arrays:  # takes part in gathering
            pass
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.parent / f".{path.name}.{os.getpid()}.partial"
    partial.mkdir()
    try:
        safetensors_file.write(partial / "model.safetensors", shapes, dtype, arrays)
        _write_config(partial / "config.json", config, dtype, tokenizer_from)
        if tokenizer_from is not None:
            _copy(Path(tokenizer_from), partial)
        os.replace(partial, path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return path


def _checked_shapes(config: Qwen3Config, params: Any) -> dict[str, tuple[int, ...]]:
    """Tensor name -> shape as written; refuses parameters of another model."""
    held = {
        tuple(str(getattr(key, "key", key)) for key in path): tuple(leaf.shape)
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }
    wanted = {p.path: p.shape for p in describe(config)}
    if held != wanted:
        paths = held.keys() | wanted.keys()
        differ = sorted(p for p in paths if held.get(p) != wanted.get(p))
        told = "; ".join(
            f"{'.'.join(p)}: given {held.get(p)}, expected {wanted.get(p)}" for p in differ[:5]
        )
        raise ValueError(
            f"the parameters are not those of this configuration ({len(differ)} differ): {told}"
        )
    return {p.hf_name: p.hf_shape for p in describe(config)}


def _arrays(config: Qwen3Config, params: Any, dtype: np.dtype) -> Iterator[tuple[str, np.ndarray]]:
    """One tensor after the other on the host, in the file's layout and dtype."""
    for parameter in describe(config):
        leaf = lookup(params, parameter.path)
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            leaf = multihost_utils.process_allgather(leaf, tiled=True)
        values = np.asarray(leaf)
        with np.errstate(over="ignore"):
            cast = values.astype(dtype, copy=False)
        if dtype == np.float16 and np.isinf(cast).sum() > np.isinf(values).sum():
            raise ValueError(
                f"{parameter.hf_name} holds values up to {np.abs(values).max():.6g}, too large for "
                "float16; write bfloat16 or float32"
            )
        yield parameter.hf_name, cast.T if parameter.transposed else cast


def _write_config(
    file: Path, config: Qwen3Config, dtype: np.dtype, source: str | os.PathLike | None
) -> None:
    content = config.to_hf() | {"dtype": str(dtype), "torch_dtype": str(dtype)}
    if source is not None and (Path(source) / "config.json").is_file():
        given = json.loads((Path(source) / "config.json").read_text("utf-8"))
        content |= {key: given[key] for key in TOKEN_IDS if key in given}
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", "utf-8")


def _copy(source: Path, target: Path) -> None:
    if not source.is_dir():
        raise FileNotFoundError(f"{source} is not a folder; give the one that holds the tokenizer")
    for name in COPIED:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
