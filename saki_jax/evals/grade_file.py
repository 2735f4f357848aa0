"""Grades a file of responses made elsewhere; behind `python -m saki_jax.evals.grade`."""

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from saki_jax.data.rows import DataError, read_rows
from saki_jax.evals.grade import Verdict, grade_all
from saki_jax.evals.grader import GraderError, MathVerifyGrader, is_available


def read(path: Path) -> list[dict]:
    """The rows of a JSON-lines file, each with a gold answer and a response.

    Raises:
      DataError: naming file and line.
    """
    rows = []
    for place, row in read_rows(path):
        if isinstance(row, ValueError):
            raise DataError(f"{path}, {place}: {row}") from row
        for field in ("gold", "response"):
            if not isinstance(row.get(field), str):
                raise DataError(
                    f"{path}, {place}: the field {field!r} must be text, found {row.get(field)!r}"
                )
        if not row["gold"].strip():
            raise DataError(f"{path}, {place}: the gold answer is empty")
        rows.append(row)
    return rows


def grade_rows(rows: Sequence[dict], *, workers: int) -> list[Verdict]:
    """Verdicts of the rows; with algebra when ``workers`` is not 0."""
    pairs = [(row["gold"], row["response"]) for row in rows]
    if workers == 0:
        return grade_all(pairs)
    with MathVerifyGrader(workers) as grader:
        return grader.grade_all(pairs)


def main(arguments: Sequence[str]) -> int | str:
    """The command; returns an exit status or the message of a refusal."""
    parser = argparse.ArgumentParser(
        prog="python -m saki_jax.evals.grade",
        description="Adds a verdict (correct, incorrect, no_answer, timeout) to each line.",
    )
    parser.add_argument("input", type=Path, help="JSON lines with the fields gold and response")
    parser.add_argument("output", type=Path, help="the same lines with the field verdict")
    parser.add_argument(
        "--workers",
        type=int,
        default=2 if is_available() else 0,
        help="processes with math-verify; 0 compares exact numbers and texts only",
    )
    args = parser.parse_args(arguments)
    if args.output.exists():
        return f"{args.output} exists; name a new file"
    try:
        rows = read(args.input)
        verdicts = grade_rows(rows, workers=args.workers)
    except (DataError, GraderError) as error:
        return str(error)
    lines = [
        json.dumps({**row, "verdict": verdict.value}, ensure_ascii=False)
        for row, verdict in zip(rows, verdicts, strict=True)
    ]
    args.output.write_text("".join(line + "\n" for line in lines), "utf-8")
    counts = Counter(verdicts)
    print(", ".join(f"{counts[verdict]} {verdict.value}" for verdict in Verdict))
    return 0
