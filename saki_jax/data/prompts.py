"""Problems, and files of them, read strictly.

A file is read whole at start-up, so that a bad line stops a run before it begins and not hours
later (case D04), and every problem has a text and an answer (case D05).
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from saki_jax.data.rows import DataError, Number, read_rows

log = logging.getLogger(__name__)

PROBLEM_FIELDS = ("problem", "prompt", "question")
ANSWER_FIELDS = ("answer", "gold", "solution")
_SHOWN = 5  # bad lines quoted in a message


@dataclass(frozen=True)
class Problem:
    """A question with its gold answer.

    Attributes:
      id: names the problem; groups the samples of an evaluation (case D07).
      problem: the question as its file has it.
      answer: gold answer, never empty. A number in the file keeps the digits it is written with.
      source: file or data set it came from.
    """

    id: str
    problem: str
    answer: str
    source: str


@dataclass(frozen=True)
class Duplicates:
    """Repeated question texts of a list of problems.

    Attributes:
      repeats: rows whose question stood in an earlier row.
      conflicts: question texts that occur with more than one answer.
    """

    repeats: int
    conflicts: tuple[str, ...]


def read_jsonl(
    path: str | Path,
    *,
    problem_field: str = "",
    answer_field: str = "",
    source: str = "",
    skip_bad_lines: bool = False,
) -> list[Problem]:
    r"""Reads a file with one problem a row: JSON lines, or the other kinds of `rows.read_rows`.

    Args:
      path: the file.
      problem_field: field of the question, with dots for nesting (``prompt.0.content``); empty:
        the first of `PROBLEM_FIELDS` that a row has.
      answer_field: likewise for the answer, from `ANSWER_FIELDS`.
      source: name kept with each problem; empty: the file's name without ending.
      skip_bad_lines: leave bad lines out, with a warning that counts them, instead of raising.

    Returns:
      The problems in file order. Rows without ``id`` are named ``<source>:<line>``.

    Raises:
      DataError: for the first bad line (unless skipped), or when no problem is left.
    """
    path = Path(path)
    source = source or path.stem
    problems, bad = [], []
    for place, row in read_rows(path):
        try:
            problems.append(problem_of(row, place, source, problem_field, answer_field))
        except ValueError as error:
            message = f"{path}, {place}: {error}"
            if not skip_bad_lines:
                raise DataError(
                    f"{message}. Mend the line, or set data.skip_bad_lines to leave such lines out."
                ) from error
            bad.append(message)
    if bad:
        shown = "; ".join(bad[:_SHOWN])
        log.warning("%s: %d bad lines left out, the first: %s", path, len(bad), shown)
    if not problems:
        raise DataError(f"{path}: no problem in this file ({len(bad)} bad lines)")
    return problems


def problem_of(
    row: dict | ValueError,
    place: str,
    source: str,
    problem_field: str = "",
    answer_field: str = "",
) -> Problem:
    """The problem in a row of `rows.read_rows`; see `read_jsonl` for the arguments.

    Raises:
      ValueError: when the row is bad, or question, answer or id are not what they must be.
    """
    if isinstance(row, ValueError):
        raise row
    text = _value(row, (problem_field,) if problem_field else PROBLEM_FIELDS)
    answer = _value(row, (answer_field,) if answer_field else ANSWER_FIELDS)
    named = row.get("id", "")
    if not isinstance(named, str):
        raise ValueError(f"the field 'id' must be text or a number, found {named!r:.40}")
    if isinstance(text, Number):
        raise ValueError(f"the question must be text, found the number {text}")
    return Problem(str(named) or f"{source}:{place.split()[-1]}", text, str(answer), source)


def find_duplicates(problems: Sequence[Problem]) -> Duplicates:
    """Counts questions that occur again, and lists those with contradictory answers."""
    answers: dict[str, set[str]] = {}
    for problem in problems:
        answers.setdefault(problem.problem.strip(), set()).add(problem.answer)
    conflicts = tuple(text for text, found in answers.items() if len(found) > 1)
    return Duplicates(len(problems) - len(answers), conflicts)


def deduplicate(problems: Sequence[Problem], *, remove: bool) -> list[Problem]:
    """Reports repeated questions and removes them when asked to (cases D01; setting data.dedup).

    Args:
      problems: rows in file order.
      remove: keep the first row of each question only, and no row of a question whose answers
        contradict each other. Otherwise all rows stay, as in the paper.
    """
    found = find_duplicates(problems)
    if not remove:
        log.info(
            "%d rows: %d repeat an earlier question, %d questions have contradictory answers; "
            "all are kept (data.dedup removes them)",
            len(problems),
            found.repeats,
            len(found.conflicts),
        )
        return list(problems)
    conflicts = set(found.conflicts)
    kept: dict[str, Problem] = {}
    for problem in problems:
        text = problem.problem.strip()
        if text not in conflicts:
            kept.setdefault(text, problem)
    log.info(
        "%d rows: %d removed (repeats, and %d questions with contradictory answers), %d kept",
        len(problems),
        len(problems) - len(kept),
        len(conflicts),
        len(kept),
    )
    return list(kept.values())


def distinct_for_evaluation(problems: Sequence[Problem]) -> list[Problem]:
    """Each problem once, whatever number of times its file repeats it (case D01).

    Raises:
      DataError: when one id names two different questions or answers.
    """
    kept: dict[str, Problem] = {}
    by_text: dict[tuple[str, str], Problem] = {}
    for problem in problems:
        other = kept.get(problem.id)
        if other and (other.problem, other.answer) != (problem.problem, problem.answer):
            raise DataError(
                f"the id {problem.id!r} names two different problems of {problem.source}; scores "
                "are grouped by id, so give each problem its own"
            )
        first = by_text.setdefault((problem.problem.strip(), problem.answer), problem)
        if first is problem:
            kept[problem.id] = problem
    if len(kept) < len(problems):
        log.info("evaluation: %d rows hold %d distinct problems", len(problems), len(kept))
    return list(kept.values())


def _value(row: dict, names: Sequence[str]) -> str:
    """The first of the named fields; it must be non-blank text or a number."""
    name = next((n for n in names if n.split(".")[0] in row), None)
    if name is None:
        raise ValueError(f"no field {' or '.join(map(repr, names))} (found: {sorted(row)})")
    value = row
    for part in name.split("."):
        try:
            value = value[int(part) if isinstance(value, list) else part]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ValueError(f"no field {name!r}: nothing at {part!r}") from error
    if not isinstance(value, str):
        raise ValueError(f"the field {name!r} must be text, found {type(value).__name__}")
    if not value.strip():
        raise ValueError(f"the field {name!r} is empty")
    return value
