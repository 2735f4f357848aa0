"""The fixed prefixes of the probe (Appendix E), frozen in one file.

Every position lies in one of the sequences (prompt and response of a guided rollout); the prefix of
a position is the sequence up to and without the token that the rollout put there.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

VERSION = 1


class ProbeError(ValueError):
    """A probe cannot be built, read or compared; the message says why and what to do."""


@dataclass(frozen=True)
class Probe:
    """n positions in r sequences over p prompts.

    Attributes:
      tokens: all sequences, one after the other, int32.
      offset: [r + 1], where each begins in ``tokens``.
      row: [n], the sequence of a position.
      prefix: [n], tokens of its prefix, at least 1.
      position: [n], its response position.
      corrected: [n], a genuine correction; otherwise a matched accepted position.
      partner: [n], the position it is matched with.
      prompt: [n], index into ``prompt_ids``.
      prompt_ids: [p] names.
      initial: figures [n] of the initial student (see `probe_measure.FIGURES`).
      meta: where it comes from, a JSON object.
    """

    tokens: np.ndarray
    offset: np.ndarray
    row: np.ndarray
    prefix: np.ndarray
    position: np.ndarray
    corrected: np.ndarray
    partner: np.ndarray
    prompt: np.ndarray
    prompt_ids: np.ndarray
    initial: dict[str, np.ndarray]
    meta: dict[str, Any]

    def __len__(self) -> int:
        return len(self.row)

    def sequence(self, row: int) -> np.ndarray:
        """The tokens of a sequence."""
        return self.tokens[self.offset[row] : self.offset[row + 1]]

    def fingerprint(self) -> str:
        """Names the prefixes: measurements of equal fingerprints can be compared."""
        digest = hashlib.sha256()
        for array in (self.tokens, self.offset, self.row, self.prefix):
            digest.update(np.ascontiguousarray(array, "<i8").tobytes() + b"|")
        return digest.hexdigest()[:16]


_ARRAYS = {
    "tokens": np.int32,
    "offset": np.int64,
    "row": np.int32,
    "prefix": np.int32,
    "position": np.int32,
    "corrected": np.bool_,
    "partner": np.int32,
    "prompt": np.int32,
}


def save(path: str | Path, probe: Probe) -> None:
    """Writes the file (.npz). An existing one is not overwritten: a probe stays what it is.

    Raises:
      ProbeError: the file exists.
    """
    path = Path(path)
    if path.exists():
        raise ProbeError(f"{path} exists; a probe is frozen, so choose another name")
    arrays = {name: np.asarray(getattr(probe, name), dtype) for name, dtype in _ARRAYS.items()}
    arrays |= {f"initial_{name}": values for name, values in probe.initial.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "xb") as file:
        np.savez_compressed(
            file,
            prompt_ids=np.asarray(probe.prompt_ids, np.str_),
            meta=np.array(json.dumps({"version": VERSION} | probe.meta)),
            **arrays,
        )


def load(path: str | Path) -> Probe:
    """Reads a file of `save`.

    Raises:
      ProbeError: it is missing, no probe, or of another version.
    """
    arrays = read_npz(path)
    missing = [name for name in (*_ARRAYS, "prompt_ids", "meta") if name not in arrays]
    if missing:
        raise ProbeError(f"{path} is not a probe: it has no {', '.join(missing)}")
    meta = json.loads(str(arrays["meta"]))
    if meta.get("version") != VERSION:
        raise ProbeError(f"{path} is a probe of version {meta.get('version')}, not {VERSION}")
    return Probe(
        **{name: arrays[name] for name in _ARRAYS},
        prompt_ids=arrays["prompt_ids"],
        initial={
            name.removeprefix("initial_"): values
            for name, values in arrays.items()
            if name.startswith("initial_")
        },
        meta=meta,
    )


def read_npz(path: str | Path) -> dict[str, np.ndarray]:
    """All arrays of an .npz file; nothing in it is executed.

    Raises:
      ProbeError: it is missing or no such file.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            return dict(file)
    except FileNotFoundError as error:
        raise ProbeError(f"{path}: no such file") from error
    except (ValueError, OSError) as error:
        raise ProbeError(f"{path} cannot be read ({error})") from error
