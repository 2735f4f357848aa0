"""The figures of a comparison as a document."""

import os
import subprocess
from pathlib import Path
from typing import Any

from replication.probes import TOP
from saki_jax.evals.bootstrap import Estimate
from saki_jax.evals.table import Table

TITLES = {
    "opd": "OPD",
    "exopd": "ExOPD",
    "skd": "SKD",
    "trb": "TRB",
    "random_tm": "Random-TM",
    "tv_weighted_tm": "TV-weighted-TM",
    "teacher_sampled": "Teacher-sampled",
    "saki": "SAKI",
}

_HEAD = """# The methods in the small

Written by `scripts/replicate_small.py`; do not edit. All figures are in the JSON file beside it.

    {command}

{runs} runs on the embedded addition task with four-digit numbers: a teacher of about 100k
parameters, and a student of 52k that was taught on scratchpads with corrupted columns. Every method
has the same seeds ({seeds}) and, with a seed, the same prompts and random numbers, {steps} steps of
{prompts} prompts × {samples} responses and the same optimiser; runs differ in `method` alone. ε
falls from {epsilon} to 0 at step {zero_at}. Task, budget and length were fixed by runs of SAKI
alone before any two methods were compared; what was changed later stands in
configs/replicate_small.py. Evaluation: the student alone,
{k} samples to each of {problems} held-out problems. Commit {commit}; {cores} cores;
{minutes:.0f} minutes of steps, summed over the runs.

**What this can say.** A toy task, models of a hundred thousand parameters and a teacher that is
nearly deterministic: an order of methods here says nothing about their order at the paper's scale.

**Intervals** are 95 % percentile intervals from 10,000 resamples. Problems *and* seeds are redrawn,
each crossing the other: all methods and seeds see the same redrawn problems, all methods the same
redrawn seeds, and differences are paired by both. Of S seeds S − 1 are redrawn, so that the
variance between seeds is not shown too small (a single seed stays as it is: the interval is then of
the problems alone). Each table has {differences} differences to {reference}; if no method differed,
there would still be a chance of about {chance:.0%} that one of them leaves 0 out.
"""


def document(found: dict[str, Any], command: str) -> str:
    """The whole document as Markdown."""
    tables = [scores_table(found), phases_table(found)]
    tables += [probe_table(found, group) for group in found["probe"]["groups"]]
    config, differences = found["config"], len(found["methods"]) - 1
    head = _HEAD.format(
        command=command,
        runs=len(found["methods"]) * len(found["seeds"]),
        seeds=", ".join(map(str, found["seeds"])),
        steps=config["steps"],
        prompts=config["data.prompts_per_step"],
        samples=config["data.samples"],
        epsilon=config["epsilon.start"],
        zero_at=config["epsilon.zero_at"],
        problems=found["scores"]["problems"],
        k=found["scores"]["samples"],
        commit=commit(),
        cores=os.cpu_count(),
        minutes=found["seconds"] / 60,
        count=len(found["seeds"]),
        differences=differences,
        reference=title(found["reference"]),
        chance=1 - 0.95**differences,
    )
    return "\n".join([head, verdict(found), *(table.to_markdown() for table in tables)])


def verdict(found: dict[str, Any]) -> str:
    """Which differences to the reference have an interval without 0, in words."""
    reference, lines = title(found["reference"]), []
    for figure, name in _figures(found).items():
        part = found["scores"][figure]
        apart = [
            f"{title(method)} {each['value']:+.1f} [{each['low']:+.1f}, {each['high']:+.1f}]"
            for method, each in part["difference"].items()
            if each["low"] > 0 or each["high"] < 0
        ]
        least = part["smallest_difference"]
        if least is not None:
            lines.append(
                f"- **{name}.** Minus {reference}, in points: "
                f"{'; '.join(apart) or 'no interval leaves 0 out'}. "
                f"Smallest difference that these runs would show four times in five: {least:.1f}."
            )
    return "## What came out\n\n" + "\n".join(lines) + "\n"


def scores_table(found: dict[str, Any]) -> Table:
    """Mean@k and Pass@k of every method, and its differences to the reference."""
    names, scores = _figures(found), found["scores"]
    reference = title(found["reference"])
    start = tuple(_estimate(scores[figure]["before"]) for figure in names)
    rows = [("before training", start[0], None, start[1], None, None)]
    for method in found["methods"]:
        cells: list[Any] = [title(method)]
        for figure in names:
            part = scores[figure]
            difference = part["difference"].get(method)
            cells += [
                _estimate(part["after"][method]),
                _estimate(difference) if difference else None,
            ]
        by_seed = scores["mean"]["by_seed"][method]
        rows.append((*cells, ", ".join(f"{value:.1f}" for value in by_seed)))
    mean, passed = names.values()
    return Table(
        "scores",
        f"{mean} and {passed}, %",
        ("", mean, f"− {reference}", passed, f"− {reference}", f"{mean} by seed"),
        tuple(rows),
    )


def phases_table(found: dict[str, Any]) -> Table:
    """Corrections beside TV and its bound."""
    rows = [
        (
            title(method),
            "{}–{}".format(*phase["steps"]),
            phase["corrections"],
            phase["tv"],
            phase["bound"],
            phase["teacher_mode"],
        )
        for method, phases in found["phases"].items()
        for phase in phases
        if any(each["corrections"] for each in phases)
    ]
    return Table(
        "phases",
        "Corrections by phase, % of the response tokens",
        ("", "steps", "corrections", "mean TV(p, q)", "mean √(ε/2)", "teacher-mode targets"),
        tuple(rows),
        "Maximal coupling corrects with probability TV(p, q), which Pinsker's inequality bounds by "
        "√(ε/2). SKD has no q: its column counts the tokens that the teacher replaced, which were "
        "outside its top 4 (the usual 25 are more than there are). Methods that correct nothing "
        "are left out.",
        digits=2,
    )


def probe_table(found: dict[str, Any], group: str) -> Table:
    """C1, C_top and their difference, before and after."""
    part = found["probe"]["groups"][group]
    key = part["c16_minus_c1"]

    def row(name: str, of: str, method: str | None) -> tuple:
        cells = [_estimate(part[f][of][method] if method else part[f][of]) for f in part]
        difference = key["difference"].get(method)
        return (name, *cells, _estimate(difference) if difference else None)

    top = f"C{TOP}"
    return Table(
        f"probe_{group}",
        f"Fixed-prefix probe, {group} positions, %",
        ("", "C1", top, f"{top} − C1", f"{top} − C1, − {title(found['reference'])}"),
        (
            row("before training", "before", None),
            *(row(title(method), "after", method) for method in found["methods"]),
        ),
        f"{found['probe']['positions'] // 2} corrections of the initial student at ε = "
        f"{found['probe']['epsilon']}, and as many accepted positions matched to them, over "
        f"{found['probe']['prompts']} prompts. The paper's C16 says nothing where the vocabulary "
        f"has 16 tokens: here it is {top}. Prompts and seeds are redrawn.",
        digits=2,
    )


def title(method: str) -> str:
    """What the paper calls the method."""
    return TITLES.get(method, method)


def commit() -> str:
    """The commit of the code, marked where the tree differs from it; "unknown" outside git."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _figures(found: dict[str, Any]) -> dict[str, str]:
    k = found["scores"]["samples"]
    return {"mean": f"Mean@{k}", "pass": f"Pass@{k}"}


def _estimate(fields: dict[str, Any]) -> Estimate:
    return Estimate(**fields)
