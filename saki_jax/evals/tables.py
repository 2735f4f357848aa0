"""The paper's tables from the folders of evaluations.

Usage::

    python -m saki_jax.evals.tables RUN/evals/step_000200 ... --out tables/
    python -m saki_jax.evals.tables saki@1.7B=DIR trb@1.7B=DIR ...       # other names for rows

Each folder is one evaluated model (`session.run`). Folders of the same method and student size are
runs with different seeds and are averaged problem by problem. Figures are per cent; intervals are
95 % bootstrap intervals over problems, differences are paired by problem.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from saki_jax.data.benchmarks import BENCHMARKS
from saki_jax.evals.bootstrap import Estimate
from saki_jax.evals.entries import AVERAGE, METHOD_TITLES, Entry, TablesError, read_entries
from saki_jax.evals.folder import FolderError, write_json, write_text
from saki_jax.evals.results import MEAN, PASS
from saki_jax.evals.table import Cell, Table

CONTROLS = ("trb", "random_tm", "tv_weighted_tm", "teacher_sampled", "saki")
MATCHED_CONTROLS = CONTROLS[1:-1]


def build(entries: Sequence[Entry]) -> list[Table]:
    """All tables that the entries allow."""
    sets = _all_sets(entries)
    note = _note(entries, sets)
    main = [e for e in entries if e.method not in MATCHED_CONTROLS]
    controls = [e for e in entries if e.method in CONTROLS]
    k = entries[0].runs[0]["protocol"]["samples"]
    tables = []
    if main:
        tables.append(_per_set("table_1", f"Table 1: Mean@{k}", main, MEAN, sets, note))
    if any(e.method in MATCHED_CONTROLS for e in entries):
        tables.append(_controls("table_2", "Table 2: controls of placement", controls, sets, note))
    if main:
        tables.append(_per_set("table_6", f"Table 6: Pass@{k}", main, PASS, sets, note))
    if any(e.method in MATCHED_CONTROLS for e in entries):
        title = f"Table 8: controls of placement, Mean@{k} by set"
        tables.append(_per_set("table_8", title, controls, MEAN, sets, note))
    split = _decomposition(entries, sets, k)
    return [*tables, split] if split.rows else tables


def summary_table(summary: Mapping[str, Any]) -> Table:
    """One evaluation: a row a set, and the average."""
    k = summary["protocol"]["samples"]
    rows: list[tuple[Cell, ...]] = []
    for result in summary["sets"].values():
        rows.append(
            (
                result["title"] + ("" if result["whole"] else " (part)"),
                result["problems"],
                *(Estimate(**result[figure]).scaled(100.0) for figure in (MEAN, PASS)),
                100.0 * result["truncated"],
                float(result["mean_length"]),
                result["verdicts"].get("no_answer", 0),
            )
        )
    average = (Estimate(**summary["average"][figure]).scaled(100.0) for figure in (MEAN, PASS))
    rows.append((AVERAGE, sum(row[1] for row in rows), *average, None, None, None))
    columns = ("set", "problems", f"Mean@{k}", f"Pass@{k}", "cut %", "tokens", "no answer")
    protocol = summary["protocol"]
    step = "" if protocol["step"] is None else f", step {protocol['step']}"
    title = f"{protocol['method']}, {protocol['student']}{step}"
    note = (
        "Per cent, with 95 % bootstrap intervals over problems. The average is over the sets shown."
    )
    if not summary["finished"]:
        note += " **Not finished: sets are missing.**"
    return Table("summary", title, columns, tuple(rows), note)


def _per_set(
    name: str, title: str, entries: Sequence[Entry], figure: str, sets: Sequence[str], note: str
) -> Table:
    columns = ("method", "student", *(_title(entries, s) for s in sets), AVERAGE, "runs", "sd")
    rows = tuple(
        (
            e.title,
            e.student,
            *(e.estimate(s, figure, sets) for s in (*sets, AVERAGE)),
            len(e.runs),
            e.spread(figure, sets),
        )
        for e in entries
    )
    return Table(name, title, columns, rows, note)


def _controls(
    name: str, title: str, entries: Sequence[Entry], sets: Sequence[str], note: str
) -> Table:
    """Averages, and what SAKI has more than each, paired."""
    k = entries[0].runs[0]["protocol"]["samples"]
    saki = {e.student: e for e in entries if e.method == "saki"}
    rows = []
    for e in entries:
        best = saki.get(e.student)
        compared = best is not None and best is not e
        rows.append(
            (
                e.title,
                e.student,
                *(e.estimate(AVERAGE, figure, sets) for figure in (MEAN, PASS)),
                *(best.minus(e, figure, sets) if compared else None for figure in (MEAN, PASS)),
                len(e.runs),
            )
        )
    columns = ("method", "student", f"Mean@{k}", f"Pass@{k}")
    columns += (f"SAKI minus it, Mean@{k}", f"SAKI minus it, Pass@{k}", "runs")
    return Table(name, title, columns, tuple(rows), note)


def differences(entries: Sequence[Entry], reference: str) -> Table:
    """What each entry has more than the reference of the same student size, paired by problem.

    Args:
      entries: see `read_entries`.
      reference: a method.

    Raises:
      TablesError: when no entry is of that method.
    """
    base = {e.student: e for e in entries if e.method == reference}
    if not base:
        raise TablesError(
            f"the reference {reference!r} is none of {', '.join(e.method for e in entries)}"
        )
    sets = _all_sets(entries)
    k = entries[0].runs[0]["protocol"]["samples"]
    rows = [
        (
            e.title,
            e.student,
            f"{title}@{k}",
            *(e.minus(base[e.student], figure, [s]) for s in sets),
            e.minus(base[e.student], figure, sets),
        )
        for e in entries
        if e.student in base and e is not base[e.student]
        for figure, title in ((MEAN, "Mean"), (PASS, "Pass"))
    ]
    columns = ("method", "student", "figure", *(_title(entries, s) for s in sets), AVERAGE)
    title = f"Differences to {METHOD_TITLES.get(reference, reference)}"
    return Table("differences", title, columns, tuple(rows), _note(entries, sets))


def _decomposition(entries: Sequence[Entry], sets: Sequence[str], k: int) -> Table:
    """What the budget of teacher-mode tokens brings, and what placing it at corrections brings."""
    by_key = {(e.method, e.student): e for e in entries}
    rows = []
    for student in dict.fromkeys(e.student for e in entries):
        chain = [by_key.get((m, student)) for m in ("trb", "random_tm", "saki")]
        if None in chain:
            continue
        trb, random_tm, saki = chain
        steps = {
            "budget: TRB → Random-TM": (random_tm, trb),
            "placement: Random-TM → SAKI": (saki, random_tm),
            "both: TRB → SAKI": (saki, trb),
        }
        rows += [
            (student, what, *(a.minus(b, figure, sets) for figure in (MEAN, PASS)))
            for what, (a, b) in steps.items()
        ]
    note = "Points of the average over sets, paired by problem, 95 % bootstrap intervals."
    columns = ("student", "step", f"Mean@{k}", f"Pass@{k}")
    return Table("figure_3c", "Figure 3(c): budget and placement", columns, tuple(rows), note)


def _all_sets(entries: Sequence[Entry]) -> list[str]:
    there = {name for entry in entries for name in entry.sets()}
    ordered = [name for name in BENCHMARKS if name in there]
    return ordered + sorted(there - set(ordered))


def _title(entries: Sequence[Entry], name: str) -> str:
    return next(e.runs[0]["sets"][name]["title"] for e in entries if name in e.sets())


def _note(entries: Sequence[Entry], sets: Sequence[str]) -> str:
    parts = ["Per cent, with 95 % bootstrap intervals over problems (10,000 resamples)."]
    if any(len(e.runs) > 1 for e in entries):
        parts.append(
            "Runs with different seeds are averaged problem by problem: the intervals do not "
            "hold the spread between seeds, which is `sd` (of the average, in points)."
        )
    some = [run["sets"].get(name) for e in entries for run in e.runs for name in sets]
    if any(result and not result["whole"] for result in some):
        parts.append("**Only part of some sets was evaluated.**")
    if any(not run["finished"] for e in entries for run in e.runs):
        parts.append("**Some evaluations are not finished.**")
    absent = [b.title for b in BENCHMARKS.values() if b.name not in sets]
    if absent and len(absent) < len(BENCHMARKS):
        parts.append(f"The average is without {', '.join(absent)}.")
    return " ".join(parts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the tables as Markdown and writes them; 1 when they cannot be made."""
    parser = argparse.ArgumentParser(
        prog="python -m saki_jax.evals.tables",
        description="The paper's tables from folders of evaluations.",
    )
    parser.add_argument("folders", nargs="+", metavar="[METHOD[@STUDENT]=]DIR")
    parser.add_argument(
        "--reference", default="", metavar="METHOD", help="adds differences to it, set by set"
    )
    parser.add_argument("--out", default="", metavar="DIR", help="tables.md, tables.json, *.csv")
    options = parser.parse_args(arguments)
    try:
        entries = read_entries(options.folders)
        tables = build(entries)
        if options.reference:
            tables.append(differences(entries, options.reference))
    except (TablesError, FolderError) as error:
        print(error, file=sys.stderr)
        return 1
    text = "\n".join(table.to_markdown() for table in tables)
    print(text)
    if options.out:
        write_tables(options.out, tables)
    return 0


def write_tables(out: str | Path, tables: Sequence[Table]) -> None:
    """Writes tables.md, tables.json and a CSV file each."""
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "tables.md", "\n".join(table.to_markdown() for table in tables))
    write_json(folder / "tables.json", {table.name: table.to_json() for table in tables})
    for table in tables:
        write_text(folder / f"{table.name}.csv", table.to_csv())


if __name__ == "__main__":
    sys.exit(main())
