"""What a data file holds, before anything is trained on it.

Usage::

    python -m saki_jax.data check train.parquet --tokenizer DIR --against sets/ [--json report.json]

Nothing is changed. Bad rows, contradictory golds and overlap are reported, not mended.
"""

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from saki_jax.data import benchmarks
from saki_jax.data.answer_format import INSTRUCTION
from saki_jax.data.prompts import DataError, Problem, find_duplicates, problem_of
from saki_jax.data.rows import read_rows
from saki_jax.data.template import TEMPLATES, PromptFormat, render, strip_instruction
from saki_jax.models import tokenizer as tokenizers
from saki_jax.models.tokenizer import Tokenizer, TokenizerError

_SHOWN = 10  # examples of each kind of fault


def question_key(question: str) -> str:
    """The question without known instructions and white space: equal for the same problem.

    Equality of keys finds copies, not paraphrases, so an overlap counted with it is a lower bound.
    """
    return re.sub(r"\s+", "", strip_instruction(question))


def check_file(
    path: str | Path,
    *,
    problem_field: str = "",
    answer_field: str = "",
    tokenizer: Tokenizer | None = None,
    prompt_format: PromptFormat | None = None,
    max_length: int = 1024,
    against: Mapping[str, Sequence[Problem]] | None = None,
) -> dict:
    """The report on one file as a JSON object.

    Args:
      path: the file; bad rows are counted and left out.
      problem_field, answer_field: as in `prompts.read_jsonl`.
      tokenizer: without one, token lengths are not reported.
      prompt_format: how prompts are made from questions; lengths count the whole prompt.
      max_length: prompts over it are counted.
      against: evaluation sets whose questions are looked for.

    Raises:
      DataError: when the file is missing, unreadable or has no good row.
    """
    path = Path(path)
    problems, bad = [], []
    for place, row in read_rows(path):
        try:
            problems.append(problem_of(row, place, path.stem, problem_field, answer_field))
        except ValueError as error:
            bad.append(f"{place}: {error}")
    if not problems:
        raise DataError(f"{path}: no good row ({len(bad)} bad, the first: {bad[:1]})")
    report = {
        "file": str(path),
        "rows": len(problems) + len(bad),
        "bad_rows": len(bad),
        "bad_rows_shown": bad[:_SHOWN],
        **_duplicates(problems),
        **_answers(problems),
        "instruction_suffixes": sum(strip_instruction(p.problem) != p.problem for p in problems),
    }
    if tokenizer is not None:
        report["tokens"] = _lengths(
            problems, tokenizer, prompt_format or PromptFormat(), max_length
        )
    if against:
        report["overlap"] = {name: _overlap(problems, set_) for name, set_ in against.items()}
    return report


def _duplicates(problems: Sequence[Problem]) -> dict:
    found = find_duplicates(problems)
    golds: dict[str, list[str]] = {text: [] for text in found.conflicts}
    for problem in problems:
        seen = golds.get(problem.problem.strip())
        if seen is not None and problem.answer not in seen:
            seen.append(problem.answer)
    return {
        "distinct_questions": len(problems) - found.repeats,
        "repeats": found.repeats,
        "conflicts": len(found.conflicts),
        "conflicts_shown": [
            {"question": text[:120], "answers": answers}
            for text, answers in list(golds.items())[:_SHOWN]
        ],
    }


def _answers(problems: Sequence[Problem]) -> dict:
    kinds = {
        "integers": r"[+-]?\d+",
        "decimals": r"[+-]?\d*\.\d+(?:[eE][+-]?\d+)?",
        "negative_integers": r"-\d+",
    }
    return {
        "answers": {
            name: sum(bool(re.fullmatch(kind, p.answer.strip())) for p in problems)
            for name, kind in kinds.items()
        }
    }


def _lengths(
    problems: Sequence[Problem], tokenizer: Tokenizer, prompt_format: PromptFormat, limit: int
) -> dict:
    lengths = np.array(
        [len(tokenizer.encode(render(p.problem, prompt_format, tokenizer))) for p in problems]
    )
    return {
        "template": prompt_format.template,
        "mean": float(lengths.mean()),
        "p50": int(np.quantile(lengths, 0.5, method="lower")),
        "p99": int(np.quantile(lengths, 0.99, method="lower")),
        "max": int(lengths.max()),
        "limit": limit,
        "over_limit": int((lengths > limit).sum()),
    }


def _overlap(problems: Sequence[Problem], evaluation: Sequence[Problem]) -> dict:
    keys = {question_key(p.problem) for p in problems}
    hit = [p.id for p in evaluation if question_key(p.problem) in keys]
    return {"problems": len(evaluation), "found_here": len(hit), "ids_shown": hit[:_SHOWN]}


def describe(report: Mapping) -> str:
    """The report in words, for a terminal."""
    lines = [
        f"{report['file']}",
        f"  rows                {report['rows']}, of them {report['bad_rows']} bad",
        f"  distinct questions  {report['distinct_questions']} ({report['repeats']} repeats)",
        f"  contradictory golds {report['conflicts']} questions",
        "  answers             "
        + ", ".join(f"{n} {name.replace('_', ' ')}" for name, n in report["answers"].items()),
        f"  instruction suffix  on {report['instruction_suffixes']} questions",
    ]
    lines += [f"    bad {text}" for text in report["bad_rows_shown"]]
    lines += [
        f"    {c['question']!r}: {' / '.join(c['answers'])}" for c in report["conflicts_shown"]
    ]
    if "tokens" in report:
        t = report["tokens"]
        lines.append(
            f"  prompt tokens       mean {t['mean']:.1f}, median {t['p50']}, p99 {t['p99']}, "
            f"max {t['max']}; {t['over_limit']} over {t['limit']} ({t['template']} template)"
        )
    for name, found in report.get("overlap", {}).items():
        ids = f" ({', '.join(found['ids_shown'])})" if found["found_here"] else ""
        lines.append(
            f"  overlap             {found['found_here']} of {found['problems']} of {name}{ids}"
        )
    return "\n".join(lines)


def evaluation_sets(given: Sequence[str]) -> dict[str, list[Problem]]:
    """The sets named on the command line: folders (`benchmarks.find_files`) or ``NAME=FILE``.

    The sizes of sets are not checked here: part of a set can overlap too.
    """
    files: dict[str, list[Path]] = {}
    for argument in given:
        name, equals, path = argument.partition("=")
        if not equals:
            files |= benchmarks.find_files(argument)
        else:
            files.setdefault(name, []).append(Path(path))
    return {name: benchmarks.read_set(name, paths) for name, paths in files.items()}


def main(arguments: Sequence[str]) -> int:
    """Prints a report for each file; returns 1 when a file has bad rows or cannot be read."""
    options = _parser().parse_args(arguments)
    prompt_format = PromptFormat(template=options.template, instruction=options.instruction)
    reports = []
    try:
        tokenizer = tokenizers.load(options.tokenizer) if options.tokenizer else None
        against = evaluation_sets(options.against)
        for file in options.files:
            reports.append(
                check_file(
                    file,
                    problem_field=options.problem_field,
                    answer_field=options.answer_field,
                    tokenizer=tokenizer,
                    prompt_format=prompt_format,
                    max_length=options.max_length,
                    against=against,
                )
            )
            print(describe(reports[-1]))
    except (DataError, TokenizerError) as error:
        print(error, file=sys.stderr)
        return 1
    if options.json:
        text = json.dumps(reports, indent=2, ensure_ascii=False)
        Path(options.json).write_text(text + "\n", "utf-8")
    return int(any(report["bad_rows"] for report in reports))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m saki_jax.data check", description="Reports what data files hold."
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help=".jsonl, .json or .parquet")
    parser.add_argument("--tokenizer", default="", help="folder; adds token lengths of prompts")
    parser.add_argument("--template", choices=TEMPLATES, default="chat", help="of the prompts")
    parser.add_argument(
        "--instruction", default=INSTRUCTION, help="appended to questions; '' or 'verbatim'"
    )
    parser.add_argument("--max-length", type=int, default=1024, help="count prompts over it")
    parser.add_argument(
        "--against",
        action="append",
        default=[],
        metavar="DIR or NAME=FILE",
        help="evaluation sets to look for in the files; may be given more than once",
    )
    parser.add_argument("--problem-field", default="", help="with dots for nesting")
    parser.add_argument("--answer-field", default="", help="with dots for nesting")
    parser.add_argument("--json", default="", metavar="OUT", help="write the report here too")
    return parser
