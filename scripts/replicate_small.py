"""Every method on the addition task, with equal seeds, prompts, steps and optimiser.

    python scripts/replicate_small.py --seeds 3 --workdir runs/replicate      # the comparison
    python scripts/replicate_small.py --seeds 5 --workdir runs/replicate      # two seeds more
    python scripts/replicate_small.py --seeds 1 --methods saki,trb --workdir runs/two  # a look

Each run is a process of `python -m saki_jax.train` with configs/replicate_small.py; options
--config.key=value go to all of them. Runs that are finished are kept, others are continued, so the
same command goes on after an interruption. In the end docs/replication.md (--out) and a JSON file
beside it are written: scores, differences and their intervals, corrections, probe.
"""

import argparse
import json
import logging
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from replication import figures, probes, report
from replication.runs import Plan, RunError, run_all

from saki_jax.evals.probe_file import ProbeError
from saki_jax.train.baselines import METHODS

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "configs" / "replicate_small.py"
COMPARED = tuple(method for method in METHODS if method != "grpo")  # that one makes teachers


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The command line: options, and what goes on to the runs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workdir", type=Path, required=True, help="of the runs")
    parser.add_argument("--seeds", type=int, default=3, help="how many, from 0 on")
    parser.add_argument(
        "--methods", default=",".join(COMPARED), help="separated by commas; default: all but grpo"
    )
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--positions", type=int, default=256, help="corrections of the probe")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "replication.md")
    options, rest = parser.parse_known_args(arguments)
    options.methods = tuple(options.methods.split(","))
    unknown = [method for method in options.methods if method not in METHODS]
    if unknown or len(set(options.methods)) < len(options.methods):
        parser.error(f"--methods: expected some of {', '.join(METHODS)}, each once")
    if options.seeds < 1 or options.jobs < 1:
        parser.error("--seeds and --jobs must be at least 1")
    strange = [argument for argument in rest if not argument.startswith("--config.")]
    if strange:
        parser.error(f"{' '.join(strange)}: options for the runs look like --config.key=value")
    return options, rest


def main(arguments: Sequence[str]) -> int:
    """Runs what is missing and writes the documents; 1 with words where a run fails."""
    options, overrides = parse(arguments)
    plan = Plan(
        CONFIG, options.methods, tuple(range(options.seeds)), options.workdir, tuple(overrides)
    )
    try:
        run_all(plan, options.jobs)
        start = json.loads((plan.folder(*next(plan.pairs())) / "config.json").read_text("utf-8"))
        probe, measured = probes.measure_all(plan, start["epsilon.start"], options.positions)
    except (RunError, ProbeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    found = figures.collect(plan, probe, measured)
    command = _command(options, overrides)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    options.out.write_text(report.document(found, command), "utf-8")
    print(report.document(found, command))
    return 0


def _command(options: argparse.Namespace, overrides: list[str]) -> str:
    """What makes the same comparison elsewhere."""
    told = ["--seeds", str(options.seeds)]
    if options.methods != COMPARED:
        told += ["--methods", ",".join(options.methods)]
    told += ["--positions", str(options.positions), *overrides]
    return f"python scripts/replicate_small.py --workdir DIR {shlex.join(told)}"


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    sys.exit(main(sys.argv[1:]))
