"""How fast the training step is, and whether its cost follows the tokens.

    python scripts/bench_update.py --preset cpu --out runs/bench_update.json

One process, one interleaved run. The same tokens come in rows of equal, of heavy-tailed and of
extremely different length, and beside them a batch in which every column of every row is filled:
what the update would cost if it did not pack. Compilation and one warm-up run are left out; medians
are given with their range. How to read it stands in docs/benchmarks.md.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench import report, roofline
from bench.presets import PRESETS as PAIRS
from bench.splits import UpdateScenario
from bench.table import machine_line
from bench.update import UpdateContest

PAPER_STEP = "generation 189.5, update 24.9, weight sync 2.5, whole 232.6"

PRESETS = {
    # Seconds; shows that everything runs. Its figures mean nothing.
    "tiny": UpdateScenario(
        "tiny",
        PAIRS["tiny"].student,
        PAIRS["tiny"].teacher,
        rows=16,
        prompt_length=3,
        response_length=24,
        mean_length=6,
        budget=64,
        repeats=2,
    ),
    # 11.5M parameters, float32, about 2,500 tokens of which the longest row may have 8 %.
    "cpu": UpdateScenario(
        "cpu",
        PAIRS["cpu"].student,
        PAIRS["cpu"].teacher,
        rows=64,
        prompt_length=8,
        response_length=192,
        mean_length=32,
        budget=512,
        slots=16,
    ),
    # Qwen3 1.7B with random weights for one accelerator.
    "h200": UpdateScenario(
        "h200",
        PAIRS["h200"].student,
        PAIRS["h200"].teacher,
        rows=128,
        prompt_length=128,
        response_length=2048,
        mean_length=300,
        budget=16384,
        chunk=2048,
        remat=True,
        slots=64,
    ),
}


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Runs a preset; prints the table, writes and returns the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", choices=sorted(PRESETS), default="cpu")
    parser.add_argument("--out", type=Path, help="where the JSON goes, besides the table")
    parser.add_argument("--repeats", type=int, help="timed rounds")
    parser.add_argument("--budget", type=int, help="tokens a micro-batch")
    options = parser.parse_args(arguments)
    given = {k: getattr(options, k) for k in ("repeats", "budget") if getattr(options, k)}
    scenario = replace(PRESETS[options.preset], **given)
    contest = UpdateContest(scenario, roofline.measure_rates(small=scenario.name == "tiny"))
    figures = contest.run()
    result = {
        "preset": scenario.name,
        "commit": report.commit(),
        "date": report.today(),
        "machine": report.machine(),
        "versions": report.versions(),
        "student": roofline.shape_of(scenario.student),
        "budget": scenario.budget,
        "rates": contest.rates._asdict(),
        **figures,
    }
    print(table(result))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return result


def table(result: dict[str, Any]) -> str:
    """The result as text."""
    lines = [
        f"preset {result['preset']}, commit {result['commit']}, {result['date']} UTC, "
        f"{result['budget']} tokens a micro-batch",
        machine_line(result),
        "",
        f"{'':14}{'lengths':>10}{'tokens':>9}{'passes':>8}{'filled':>8}{'seconds':>9}"
        f"{'(range)':>16}{'tok/s':>9}{'GFLOP/s':>9}{'of matmul':>11}",
    ]
    for name, split in result["splits"].items():
        time = split["seconds"]
        lengths = f"{split['shortest']}–{split['longest']}"
        span = f"{time['lowest']:.3f}–{time['highest']:.3f}"
        lines.append(
            f"{name:14}{lengths:>10}{split['responses']:>9}{split['passes']:>8}"
            f"{split['filled']:>8.0%}{time['median']:>9.3f}{span:>16}"
            f"{split['tokens_per_second']['median']:>9.0f}"
            f"{split['flops_per_second']['median'] / 1e9:>9.1f}{split['share_of_matmul']:>11.0%}"
        )
    for name, ratio in result["over_even"].items():
        lines.append(f"{name} over even: {_middle(ratio)}")
    lines.append(f"all columns over heavy-tailed: {_middle(result['columns_over_packed'])}")
    parts = ", ".join(f"{name} {_middle(s)}" for name, s in result["step"].items())
    lines.append(f"a step of heavy-tailed, s: {parts.replace('_', ' ')}; paper's: {PAPER_STEP}")
    for name, seconds in result["seconds"].items():
        lines.append(f"{name.replace('_', ' ')}, s: {_middle(seconds)}")
    lines.append(f"compiled programs of the update: {result['compiled_programs']}")
    return "\n".join(lines)


def _middle(figure: dict[str, float]) -> str:
    return f"{figure['median']:.3f} ({figure['lowest']:.3f}–{figure['highest']:.3f})"


if __name__ == "__main__":
    main()
