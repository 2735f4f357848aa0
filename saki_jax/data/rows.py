r"""Rows of the file kinds that data sets are published in: JSON lines, JSON, parquet.

A number keeps the digits it is written with (`Number`): 27.0 stays "27.0", and an integer of a
hundred digits survives.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path

Row = tuple[str, dict | ValueError]
"""(place in the file, the row or what is wrong with it)."""

SUFFIXES = (".jsonl", ".json", ".parquet")


class DataError(ValueError):
    """A file of problems does not hold what it must; the message names file and line."""


class Number(str):
    """A number as it is written in its file."""


def read_rows(path: str | Path) -> Iterator[Row]:
    r"""The rows of a file, by the ending of its name.

    - ``.jsonl`` and any other ending: one JSON object a line. Only ``\n`` (with an optional ``\r``
      before it) ends a line: U+2028, U+0085 and the like are text (case D03). A byte order mark,
      blank lines and a missing last newline are accepted.
    - ``.json``: a list of objects, an object whose only list is one, or JSON lines after all.
    - ``.parquet``: needs pyarrow (extra ``parquet``). NaN counts as null.

    Yields:
      Places ("line 3", "entry 3", "row 3", from 1) and rows. A bad line is yielded as the
      ValueError that tells why, so that the caller may skip it.

    Raises:
      DataError: when the file is missing, or cannot be read as what its ending says.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path}: no such file; expected one ending in {', '.join(SUFFIXES)}")
    if path.suffix == ".parquet":
        return _parquet(path)
    text = _text(path)
    if path.suffix == ".json":
        entries = _entries(text)
        if entries is not None:
            return ((f"entry {n}", _checked(e)) for n, e in enumerate(entries, start=1))
    return _lines(text)


def _lines(text: str) -> Iterator[Row]:
    for number, line in enumerate(text.split("\n"), start=1):
        line = line.removesuffix("\r")
        if not line.strip():
            continue
        try:
            row = _checked(_parse(line))
        except json.JSONDecodeError as error:
            row = ValueError(f"not one JSON object ({error.msg} at column {error.colno})")
        except ValueError as error:
            row = error
        yield f"line {number}", row


def _entries(text: str) -> list | None:
    """The list of a JSON document; None where the text is no such document."""
    try:
        document = _parse(text)
    except ValueError:
        return None
    if isinstance(document, dict):
        lists = [v for v in document.values() if isinstance(v, list) and v]
        lists = [v for v in lists if all(isinstance(entry, dict) for entry in v)]
        document = lists[0] if len(lists) == 1 else None
    return document if isinstance(document, list) else None


def _parquet(path: Path) -> Iterator[Row]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise DataError(
            f"{path}: reading parquet needs pyarrow; install the extra: pip install "
            "'saki-jax[parquet]', or convert the file to JSON lines"
        ) from error
    try:
        file = parquet.ParquetFile(path)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise DataError(f"{path}: not a parquet file ({error})") from error
    rows = (row for batch in file.iter_batches() for row in batch.to_pylist())
    return ((f"row {n}", _written(row)) for n, row in enumerate(rows, start=1))


def _written(value: object) -> object:
    """A parquet value as JSON would have it."""
    if isinstance(value, dict):
        return {name: _written(v) for name, v in value.items()}
    if isinstance(value, list):
        return [_written(v) for v in value]
    if isinstance(value, float) and math.isnan(value):
        return None
    if isinstance(value, int | float) and not isinstance(value, bool):
        return Number(value)
    return value


def _parse(text: str) -> object:
    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no JSON number")

    # Not strict: raw control characters (a tab, U+000B) inside a string are text, as in the files.
    return json.loads(
        text, parse_float=Number, parse_int=Number, parse_constant=refuse, strict=False
    )


def _checked(row: object) -> dict | ValueError:
    if isinstance(row, dict):
        return row
    return ValueError(f"expected a JSON object, found {type(row).__name__}")


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise DataError(f"{path}, line {line}: not UTF-8 ({error.reason})") from error
