"""The safetensors format: headers checked before use, slices read, files written tensor by tensor.

A file is 8 bytes (the header's length, little endian), a JSON header that gives each tensor's
dtype, shape and byte range, and the bytes. Reading it here, rather than through a library, lets the
errors name the path, and lets a device take just its own rows: no file is ever held whole.
"""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

_LFS_MARK = b"version https://git-lfs"
_HEADER_LIMIT = 100_000_000  # the format's own limit, in bytes
_BLOCK = 1 << 18  # bytes converted at a time: a transposition that stays in the processor's cache


class FileProblem(ValueError):
    """What is wrong with a file, with its path and what to do."""


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies.

    Attributes:
      file: the file's path.
      dtype: the format's name of the type, "BF16" for instance.
      shape: as stored.
      begin: offset of the first byte in the file.
      end: offset behind the last byte.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    def read(
        self, index: tuple[slice, ...], dtype: np.dtype, *, transposed: bool = False
    ) -> np.ndarray:
        """The part ``index`` of the tensor in the wanted dtype.

        Rows are read and converted block by block, so the memory used is that of the result plus
        a block. A bfloat16 tensor wanted as bfloat16 keeps its bits.

        Args:
          index: a slice per stored dimension (of which there is at least one).
          dtype: float32, float16 or bfloat16.
          transposed: return the part of a matrix with its two axes exchanged.
        """
        bounds = [part.indices(size)[:2] for part, size in zip(index, self.shape, strict=True)]
        (first, last), inner = bounds[0], tuple(slice(*b) for b in bounds[1:])
        shape = [stop - start for start, stop in bounds]
        out = np.empty(shape[::-1], dtype).T if transposed else np.empty(shape, dtype)
        stored = DTYPES[self.dtype]
        row_bytes = stored.itemsize * int(np.prod(self.shape[1:]))
        step = max(1, _BLOCK // row_bytes)
        with self.file.open("rb") as handle:
            handle.seek(self.begin + first * row_bytes)
            for row in range(first, last, step):
                rows = min(step, last - row)
                block = np.empty((rows, *self.shape[1:]), stored)
                if handle.readinto(block.reshape(-1).view(np.uint8)) != rows * row_bytes:
                    raise FileProblem(f"{self.file} became shorter while it was read")
                part = block[(slice(None), *inner)]
                out[row - first : row - first + rows] = part.astype(dtype, copy=False)
        return out.T if transposed else out


def is_lfs_pointer(file: Path) -> bool:
    """Whether the file is the small text that Git-LFS leaves in place of the real one."""
    with file.open("rb") as handle:
        return handle.read(len(_LFS_MARK)) == _LFS_MARK


def lfs_problem(file: Path) -> str:
    """The words for a Git-LFS pointer."""
    return (
        f"{file} is a Git-LFS pointer (a text of {file.stat().st_size} bytes), not the file "
        "itself; run `git lfs pull` there, or download the file"
    )


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of a file, after checking that the file is whole.

    Raises:
      FileProblem: a missing, empty, torn or overlong file, a Git-LFS pointer, or a header that
        contradicts itself.
    """
    if not file.is_file():
        raise FileProblem(f"{file} is missing; download it again")
    size = file.stat().st_size
    if is_lfs_pointer(file):
        raise FileProblem(lfs_problem(file))
    again = "download it again"
    if size == 0:
        raise FileProblem(f"{file} is empty: an incomplete download; {again}")
    with file.open("rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        if size < 8 or (length <= _HEADER_LIMIT and 8 + length > size):
            raise FileProblem(f"{file} is incomplete: it ends inside its header; {again}")
        if length > _HEADER_LIMIT:
            raise FileProblem(
                f"{file} is no safetensors file (its first 8 bytes would mean a header of {length} "
                f"bytes); {again}"
            )
        text = handle.read(length)
    try:
        header = json.loads(text)
        tensors = {
            name: _entry(file, name, entry, 8 + length)
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, FileProblem):
            raise
        raise FileProblem(
            f"{file} has a damaged header ({type(error).__name__}: {error}); {again}"
        ) from error
    _check_cover(file, tensors, 8 + length, size)
    return tensors


def _entry(file: Path, name: str, entry: Mapping, data: int) -> StoredTensor:
    begin, end = entry["data_offsets"]
    shape = tuple(int(n) for n in entry["shape"])
    stored = DTYPES.get(entry["dtype"])
    if stored is not None and end - begin != stored.itemsize * int(np.prod(shape, dtype=object)):
        raise FileProblem(
            f"{file}: tensor {name} of shape {shape} and dtype {entry['dtype']} cannot take "
            f"{end - begin} bytes; the header is damaged, download the file again"
        )
    return StoredTensor(file, str(entry["dtype"]), shape, data + begin, data + end)


def _check_cover(file: Path, tensors: Mapping[str, StoredTensor], data: int, size: int) -> None:
    """The byte ranges must follow one another from the header to the end of the file."""
    reached = data
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if tensor.begin != reached or tensor.end < tensor.begin:
            raise FileProblem(
                f"{file}: tensor {name} lies at bytes {tensor.begin} to {tensor.end}, but the one "
                f"before it ends at {reached}; the header is damaged, download the file again"
            )
        reached = tensor.end
    if reached > size:
        raise FileProblem(
            f"{file} is incomplete: its header describes {reached} bytes, it has {size}; "
            "download it again"
        )
    if reached < size:
        raise FileProblem(
            f"{file} has {size} bytes, but its header describes only {reached}: it was damaged or "
            "still being written; download it again"
        )


def write(
    file: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: np.dtype,
    arrays: Iterable[tuple[str, np.ndarray]],
) -> None:
    """Writes a file whose tensors come one at a time, in the order of ``shapes``.

    Args:
      file: written to the disk's surface before this returns.
      shapes: name -> shape.
      dtype: of every tensor.
      arrays: (name, values) in the same order; cast to ``dtype``.
    """
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        size = dtype.itemsize * int(np.prod(shape))
        header[name] = {
            "dtype": NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of 8
    with file.open("wb") as handle:
        handle.write(len(text).to_bytes(8, "little") + text)
        for (name, shape), (given, values) in zip(shapes.items(), arrays, strict=True):
            if name != given or tuple(values.shape) != tuple(shape):
                raise ValueError(f"expected {name} {shape}, got {given} {values.shape}")
            values = np.ascontiguousarray(values).astype(dtype, copy=False)
            handle.write(values.reshape(-1).view(np.uint8))
        handle.flush()
        os.fsync(handle.fileno())
