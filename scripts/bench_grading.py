"""How many responses a second are graded when some of them are made to hang the grader.

    python scripts/bench_grading.py --out runs/grading.json

512 responses in an order fixed by a seed: pairs of the grading bank (tests/evals/golden), and 5 %
hostile ones, of which half are refused unread (towers of powers, factorials, deep nesting) and half
keep math-verify busy for longer than its limit, so that a worker is killed and replaced for each.
Starting the workers is timed apart. Needs the extra `eval`.
"""

import argparse
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from saki_jax.evals.grade import grade_all
from saki_jax.evals.grader import LIMIT_SECONDS, MathVerifyGrader

BANK = Path(__file__).parent.parent / "tests" / "evals" / "golden" / "grading_bank.jsonl"
GOLD = r"\sqrt{2}"
REFUSED = ("9^{9^{9^{9}}}", "100000!", "(" * 300 + "1" + ")" * 300, "7" * 5000)

Pairs = list[tuple[str, str]]


def hanging(number: int) -> str:
    """Eight integrals, each of them seconds of algebra; another text for each number."""
    terms = [rf"\int_0^{{\infty}} e^{{-x^2}}\sin(x^{{{n}}})\,dx" for n in range(3, 19, 2)]
    return "+".join([*terms, str(number)])


def make_pairs(count: int, share: float, hang: float, bank: Path) -> Pairs:
    """`count` (gold, response) pairs; `share` of them hostile, `hang` of those reach algebra."""
    lines = bank.read_text("utf-8").split("\n")
    rows = [json.loads(line) for line in lines if line]
    ordinary = [(row["gold"], row["response"]) for row in rows]
    hostile = round(count * share)
    slow = round(hostile * hang)
    answers = [hanging(n) for n in range(slow)]
    answers += [REFUSED[n % len(REFUSED)] for n in range(hostile - slow)]
    pairs = [ordinary[n % len(ordinary)] for n in range(count - hostile)]
    pairs += [(GOLD, rf"\boxed{{{answer}}}") for answer in answers]
    random.Random(0).shuffle(pairs)
    return pairs


def measure(pairs: Pairs, workers: int, rounds: int, limit: float) -> dict[str, Any]:
    """Seconds of each round and what came out, with `workers` processes; 0: without algebra."""
    began = time.perf_counter()
    if workers == 0:
        return {"start_seconds": 0.0, **_timed(grade_all, pairs, rounds)}
    with MathVerifyGrader(workers, limit) as grader:
        start = time.perf_counter() - began
        return {"start_seconds": start, **_timed(grader.grade_all, pairs, rounds)}


def _timed(judge: Any, pairs: Pairs, rounds: int) -> dict[str, Any]:
    seconds, verdicts = [], []
    for _ in range(rounds):
        began = time.perf_counter()
        verdicts = judge(pairs)
        seconds.append(time.perf_counter() - began)
    return {
        "seconds": seconds,
        "responses_per_second": len(pairs) / statistics.median(seconds),
        "verdicts": dict(Counter(verdict.value for verdict in verdicts)),
    }


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measures with no, one, two and four workers; prints a table, writes and returns it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=512, help="responses")
    parser.add_argument("--hostile", type=float, default=0.05, help="share of them")
    parser.add_argument("--hang", type=float, default=0.5, help="share of the hostile that hang")
    parser.add_argument("--workers", default="0,1,2,4", help="0: the exact grader alone")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=float, default=LIMIT_SECONDS, help="seconds an answer")
    parser.add_argument("--out", type=Path, help="where the JSON goes, besides the table")
    options = parser.parse_args(arguments)
    pairs = make_pairs(options.count, options.hostile, options.hang, BANK)
    result = {
        workers: measure(pairs, int(workers), options.rounds, options.limit)
        for workers in options.workers.split(",")
    }
    print(f"{len(pairs)} responses, {options.hostile:.0%} hostile, medians of {options.rounds}")
    for workers, found in result.items():
        name = f"{workers} workers" if int(workers) else "exact alone"
        spread = f"{min(found['seconds']):.1f} to {max(found['seconds']):.1f} s"
        print(
            f"{name:>12}: {found['responses_per_second']:7.0f} responses/s ({spread}), start "
            f"{found['start_seconds']:.1f} s, {found['verdicts']}"
        )
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    return result


if __name__ == "__main__":
    main()
