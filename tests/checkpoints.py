"""Small checkpoint folders to load, to split and to damage; written by the safetensors library.

The library is used on purpose: what our reader is tested on does not come from our writer.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

GOLDEN = Path(__file__).parent / "models" / "golden"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
LFS_POINTER = (
    "version https://git-lfs.github.com/spec/v1\n"
    "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\n"
    "size 12345\n"
)


def copy_golden(target: Path, variant: str = "tied_2to1") -> Path:
    """A private copy of a golden checkpoint (config.json and one bfloat16 file)."""
    target.mkdir(parents=True)
    for name in ("config.json", "generation_config.json", SINGLE):
        shutil.copyfile(GOLDEN / variant / name, target / name)
    return target


def edit_config(folder: Path, remove: tuple[str, ...] = (), **changes: object) -> None:
    """Changes or removes keys of config.json."""
    file = folder / "config.json"
    raw = json.loads(file.read_text())
    raw = {k: v for k, v in raw.items() if k not in remove} | changes
    file.write_text(json.dumps(raw))


def edit_tensors(folder: Path, change: Callable[[dict], dict | None], file: str = SINGLE) -> None:
    """Rewrites a weight file; ``change`` gets name -> array, and edits it or returns another."""
    tensors = load_file(folder / file)
    tensors = change(tensors) or tensors
    save_file({k: np.ascontiguousarray(v) for k, v in tensors.items()}, folder / file)


def shard_name(number: int, count: int) -> str:
    """The hub's name of a shard."""
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def split(folder: Path, count: int) -> None:
    """Replaces the single file by ``count`` shards and their index."""
    tensors = load_file(folder / SINGLE)
    weight_map = {}
    for number, names in enumerate(np.array_split(sorted(tensors), count), start=1):
        file = shard_name(number, count)
        save_file({str(name): tensors[name] for name in names}, folder / file)
        weight_map |= {str(name): file for name in names}
    (folder / SINGLE).unlink()
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
