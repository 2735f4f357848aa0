r"""The seven evaluation sets, from the files their publishers ship, with their sizes checked.

The package ships none of them (some licences do not clearly allow it); the user brings the files::

    problems = load("aime_2025", ["aime2025-I.jsonl", "aime2025-II.jsonl"])
    found = find_files("sets/")             # {name: files} of sets/aime_2025.parquet and the like

Field names differ from publisher to publisher; `QUESTION_FIELDS`, `ANSWER_FIELDS` and `ID_FIELDS`
name those that are known. Questions, answers and ids stay as they are written; what "27.0" or
``336^\circ`` is worth is the grader's business.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from saki_jax.data.answer_format import BOX_COMMANDS
from saki_jax.data.prompts import DataError, Problem, distinct_for_evaluation
from saki_jax.data.rows import SUFFIXES, read_rows

QUESTION_FIELDS = ("problem", "question", "prompt", "Problem", "Question")
ANSWER_FIELDS = ("answer", "final_answer", "expected_answer", "Answer", "ground_truth", "gold")
SOLUTION_FIELDS = ("solution", "Solution")
ID_FIELDS = ("id", "unique_id", "problem_idx", "question_id", "idx", "ID", "Id")


@dataclass(frozen=True)
class Benchmark:
    """One evaluation set.

    Attributes:
      name: how it is called on command lines and in results.
      title: how tables call it.
      size: number of distinct problems.
      hint: what a file with another number of problems usually is.
    """

    name: str
    title: str
    size: int
    hint: str


_TWO_PARTS = "some publishers split the contest into parts I and II of 15 each: give both files"

BENCHMARKS: dict[str, Benchmark] = {
    b.name: b
    for b in (
        Benchmark("math500", "MATH-500", 500, "the whole MATH test split has 5,000 problems"),
        Benchmark("hmmt_feb_2026", "HMMT Feb 2026", 33, "HMMT Feb 2025 has 30 problems"),
        Benchmark("aime_2026", "AIME 2026", 30, _TWO_PARTS),
        Benchmark("aime_2025", "AIME 2025", 30, _TWO_PARTS),
        Benchmark("amc_2023", "AMC 2023", 40, "files with 83 problems hold AMC 12 of two years"),
        Benchmark("minerva", "Minerva", 272, "the set meant is the one of 272 problems"),
        Benchmark(
            "olympiadbench",
            "OlympiadBench",
            675,
            "meant is the part OE_TO_maths_en_COMP (maths, English, text only, open ended); some "
            "copies of it have 674 problems",
        ),
    )
}
"""The seven sets in the paper's order."""


def load(
    name: str,
    paths: Sequence[str | Path],
    *,
    question_field: str = "",
    answer_field: str = "",
    check_size: bool = True,
) -> list[Problem]:
    """Reads one of the seven sets.

    Args:
      name: a key of `BENCHMARKS`.
      paths: its file or files (see `rows.read_rows` for the kinds).
      question_field, answer_field: names to use in place of the known ones.
      check_size: compare the number of distinct problems with the set's.

    Returns:
      Each problem once, however often the file repeats it (case D01), in file order, with the
      file's own ids; rows without one are named ``<set>:<row>``.

    Raises:
      DataError: for a bad row, contradictory golds of one question, or another number of problems
        than the set has.
    """
    if name not in BENCHMARKS:
        raise DataError(f"no evaluation set {name!r}; known are {', '.join(BENCHMARKS)}")
    problems = read_set(name, paths, question_field=question_field, answer_field=answer_field)
    benchmark = BENCHMARKS[name]
    if check_size and len(problems) != benchmark.size:
        files = ", ".join(str(p) for p in paths)
        raise DataError(
            f"{benchmark.title} has {benchmark.size} problems, {files} {_hold(paths)} "
            f"{len(problems)}: {benchmark.hint}"
        )
    return problems


def read_set(
    name: str,
    paths: Sequence[str | Path],
    *,
    question_field: str = "",
    answer_field: str = "",
) -> list[Problem]:
    """Like `load`, for a set of any name and size."""
    if not paths:
        raise DataError(f"no file given for the evaluation set {name}")
    parts = [_read_file(name, Path(p), question_field, answer_field) for p in paths]
    problems = _distinct_ids(parts, paths)
    problems = distinct_for_evaluation(problems)
    _refuse_contradictions(problems)
    return problems


def find_files(folder: str | Path) -> dict[str, list[Path]]:
    """Files of the sets in a folder: ``<set>.<ending>``, or all such files in ``<set>/``.

    Returns:
      {set: files} of the sets that are there, in the paper's order.

    Raises:
      DataError: when none is, or one set has several files of different endings.
    """
    folder = Path(folder)
    found = {}
    for name in BENCHMARKS:
        single = [folder / (name + suffix) for suffix in SUFFIXES]
        files = [p for p in single if p.is_file()]
        if len(files) > 1:
            raise DataError(f"{name} is there more than once: {', '.join(map(str, files))}")
        inside = sorted(p for p in (folder / name).rglob("*") if p.suffix in SUFFIXES)
        if files or inside:
            found[name] = files or inside
    if not found:
        raise DataError(
            f"no evaluation set in {folder}; files are expected to be called "
            f"{', '.join(BENCHMARKS)}, ending in {', '.join(SUFFIXES)}"
        )
    return found


def last_boxed(solution: str) -> str:
    r"""The content of the last box of a written solution, "" where there is none.

    >>> last_boxed(r"so $x = \boxed{4.5e33}$ erg, that is \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    """
    start = max(solution.rfind(command + "{") for command in BOX_COMMANDS)
    if start < 0:
        return ""
    at = start = solution.index("{", start) + 1
    depth = 1
    while depth and at < len(solution):
        depth += {"{": 1, "}": -1}.get(solution[at], 0)
        at += 1
    return "" if depth else solution[start : at - 1].strip()


def _read_file(name: str, path: Path, question_field: str, answer_field: str) -> list[Problem]:
    problems = []
    for place, row in read_rows(path):
        try:
            if isinstance(row, ValueError):
                raise row
            question = _text(row, (question_field,) if question_field else QUESTION_FIELDS)
            answer = _answer(row, answer_field)
            named = next((row[f] for f in ID_FIELDS if row.get(f) is not None), "")
        except ValueError as error:
            raise DataError(f"{path}, {place}: {error}") from error
        number = place.split()[-1]
        problems.append(Problem(str(named) or f"{name}:{number}", question, answer, name))
    return problems


def _text(row: Mapping, fields: Sequence[str]) -> str:
    field = next((f for f in fields if f in row), None)
    if field is None:
        raise ValueError(
            f"no question: none of the fields {', '.join(fields)} (found: {sorted(row)})"
        )
    value = row[field]
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"the field {field!r} must be text, found {value!r:.60}")
    return value.strip()


def _answer(row: Mapping, answer_field: str) -> str:
    """The gold answer; where a file has none, the last box of its solution (Minerva)."""
    fields = (answer_field,) if answer_field else ANSWER_FIELDS
    field = next((f for f in fields if f in row), None)
    if field is not None:
        value = row[field]
        if isinstance(value, list):  # OlympiadBench: the parts of one answer
            value = ", ".join(v.strip() for v in value if isinstance(v, str))
        if not isinstance(value, str) or not value.strip():
            raise ValueError(f"the field {field!r} holds no answer, found {row[field]!r:.60}")
        return str(value.strip())
    for field in SOLUTION_FIELDS:
        if isinstance(row.get(field), str) and last_boxed(row[field]):
            return last_boxed(row[field])
    raise ValueError(
        f"no answer: none of the fields {', '.join(fields)}, and no box in "
        f"{' or '.join(SOLUTION_FIELDS)} (found: {sorted(row)})"
    )


def _distinct_ids(parts: Sequence[list[Problem]], paths: Sequence[str | Path]) -> list[Problem]:
    """All problems, with ids told apart by their file where files count from the same number."""
    owner: dict[str, int] = {}
    clash = any(
        owner.setdefault(problem.id, i) != i for i, part in enumerate(parts) for problem in part
    )
    if not clash:
        return [problem for part in parts for problem in part]
    return [
        Problem(f"{Path(path).stem}/{p.id}", p.problem, p.answer, p.source)
        for part, path in zip(parts, paths, strict=True)
        for p in part
    ]


def _refuse_contradictions(problems: Sequence[Problem]) -> None:
    seen: dict[str, Problem] = {}
    for problem in problems:
        other = seen.setdefault(problem.problem, problem)
        if other is not problem:
            raise DataError(
                f"{problem.source}: {other.id} and {problem.id} are the same question with the "
                f"golds {other.answer!r} and {problem.answer!r}"
            )


def _hold(paths: Sequence[str | Path]) -> str:
    return "holds" if len(paths) == 1 else "hold"
