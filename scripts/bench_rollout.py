"""How fast the exact-q engine generates, beside the student alone and what else there is.

    python scripts/bench_rollout.py --preset cpu --out runs/bench.json
    python scripts/bench_rollout.py --preset cpu --peer transformers --student DIR

One process, one interleaved run: every contender answers the same prompts with the same keys and
equally many tokens in each round, the rounds begin with another one each time, compilation and one
warm-up run are left out, and medians are given with their range. What is compared, and how to read
the table, stands in docs/benchmarks.md.
"""

import argparse
import json
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench import peers, report, roofline
from bench.contest import Contest
from bench.presets import PRESETS
from bench.scenario import Scenario, load_pair
from bench.table import table


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", choices=sorted(PRESETS), default="cpu")
    parser.add_argument("--out", type=Path, help="where the JSON goes, besides the table")
    parser.add_argument("--student", help="folder of a checkpoint in place of random weights")
    parser.add_argument("--teacher", help="likewise; the vocabularies must be equal")
    parser.add_argument("--batches", help="batch sizes in place of the preset's, e.g. 1,8,32")
    parser.add_argument("--rows", type=int, help="responses for each batch")
    parser.add_argument("--contenders", help="names in place of the preset's, separated by commas")
    parser.add_argument("--repeats", type=int, help="timed rounds")
    parser.add_argument("--median-length", type=int, help="median response length")
    parser.add_argument("--spread", type=float, help="sigma of log lengths; 0 = all equal")
    parser.add_argument("--response-length", type=int, help="T, which sizes the caches")
    parser.add_argument("--epsilon", type=float, help="in place of the calibrated one")
    parser.add_argument("--peer", choices=sorted(peers.CHILDREN), help="another generator too")
    parser.add_argument(
        "--peer-python", default=sys.executable, help="interpreter of the peer's environment"
    )
    parser.add_argument("--peer-eager", action="store_true", help="vLLM without torch.compile")
    return parser.parse_args(arguments)


def chosen_scenario(options: argparse.Namespace) -> Scenario:
    """The preset with what the command line changes."""
    scenario = PRESETS[options.preset]
    simple = ("repeats", "median_length", "spread", "response_length")
    changes = {k: getattr(options, k) for k in simple if getattr(options, k) is not None}
    if options.contenders:
        changes["contenders"] = tuple(options.contenders.split(","))
    if options.batches:
        changes["batches"] = tuple(int(b) for b in options.batches.split(","))
        changes["rows"] = tuple(4 * b for b in changes["batches"])
    if options.rows:
        changes["rows"] = (options.rows,) * len(changes.get("batches", scenario.batches))
    return replace(scenario, **changes)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Runs a preset; prints the table, writes and returns the result."""
    options = parse(arguments)
    scenario, pair = load_pair(chosen_scenario(options), options.student, options.teacher)
    rates = roofline.measure_rates(small=scenario.name == "tiny")
    result: dict[str, Any] = {
        "preset": scenario.name,
        "commit": report.commit(),
        "date": report.today(),
        "machine": report.machine(),
        "versions": report.versions(),
        "pair": {
            role: roofline.shape_of(getattr(scenario, role)) for role in ("student", "teacher")
        },
        "batches": {},
        "exact_q": {},
    }
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        models = peers.export(folder, scenario, pair) if options.peer else {}
        for batch, rows in zip(scenario.batches, scenario.rows, strict=True):
            contest = Contest(scenario, pair, batch, rows, rates)
            if options.peer:
                work = peers.job(
                    models, contest.prompts, contest.lengths, batch, options.peer_eager
                )
                peer = peers.Peer(options.peer, options.peer_python, work, folder)
                stack.callback(peer.close)
                contest.add_peer(peer)
            part = contest.run(options.epsilon)
            rates = contest.rates
            result["rates"] = rates._asdict()
            result["batches"][str(batch)] = part
            if "exact_q" in part:
                result["exact_q"][str(batch)] = part["exact_q"]
            if options.out:  # after every batch size, so that an interrupted run leaves some
                options.out.parent.mkdir(parents=True, exist_ok=True)
                options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))
    return result


if __name__ == "__main__":
    main()
