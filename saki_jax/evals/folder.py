"""The folder of an evaluation: what lies where, and what may be continued in it.

    protocol.json         model and settings; written once, another one is refused
    sets.json             which problems each set holds
    responses/<set>.jsonl all responses (see responses.py)
    summary.json          scores with intervals, and each problem's number of right samples
    summary.md            the same as a table

`summary.*` follow from the responses and are written anew; nothing else is overwritten.
"""

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

_SHOWN_KEYS = 12


class FolderError(ValueError):
    """The folder belongs to another evaluation or to another process; the message says which."""


class EvaluationFolder:
    """Paths of an evaluation and the rules of the module's docstring."""

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        self.protocol = self.path / "protocol.json"
        self.sets = self.path / "sets.json"
        self.summary = self.path / "summary.json"
        self.table = self.path / "summary.md"
        self._lock: TextIO | None = None

    def responses(self, name: str) -> Path:
        """The file of a set's responses."""
        return self.path / "responses" / f"{name}.jsonl"

    def claim(self, protocol: Mapping[str, Any]) -> bool:
        """Takes the folder for an evaluation; True if one is continued.

        Raises:
          FolderError: it holds an evaluation of another model or protocol, or another process is
            working in it.
        """
        (self.path / "responses").mkdir(parents=True, exist_ok=True)
        self._take_lock()
        if not self.protocol.exists():
            write_json(self.protocol, protocol)
            return False
        before = read_json(self.protocol)
        self._refuse_other(
            before, json.loads(json.dumps(protocol)), "an evaluation of another kind"
        )
        return True

    def claim_set(self, name: str, identity: Mapping[str, Any]) -> None:
        """Notes which problems a set holds.

        Raises:
          FolderError: the folder holds responses to other problems under this name.
        """
        known = read_json(self.sets) if self.sets.exists() else {}
        if name in known:
            self._refuse_other(known[name], dict(identity), f"responses to another set {name!r}")
        else:
            write_json(self.sets, known | {name: dict(identity)})

    def release(self) -> None:
        """Lets other processes have the folder."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _refuse_other(self, before: Mapping, now: Mapping, what: str) -> None:
        differ = [k for k in sorted({*before, *now}) if before.get(k) != now.get(k)]
        if differ:
            told = "\n".join(
                f"  {k}: {json.dumps(before.get(k))} there, {json.dumps(now.get(k))} now"
                for k in differ[:_SHOWN_KEYS]
            )
            raise FolderError(
                f"{self.path} holds {what}:\n{told}\n"
                "choose another --workdir, or the same values to continue"
            )

    def _take_lock(self) -> None:
        # The system lets go of it when the process dies, however it dies.
        self._lock = open(self.path / ".lock", "a")  # noqa: SIM115
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.release()
            raise FolderError(
                f"another process is working in {self.path}; wait for it, or choose another "
                "--workdir"
            ) from error


def read_json(path: Path) -> Any:
    """The content of a JSON file.

    Raises:
      FolderError: when it is missing or damaged.
    """
    try:
        return json.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise FolderError(f"{path} is missing: not the folder of an evaluation") from error
    except json.JSONDecodeError as error:
        raise FolderError(f"{path} is not JSON ({error})") from error


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON file that is there whole or not at all."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Writes a text file that is there whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, "utf-8")
    os.replace(partial, path)
