"""Whether an accelerator computes what a CPU computes, and then how fast.

    JAX_PLATFORMS=cuda,cpu python scripts/check_accelerator.py --out runs/accelerator --minutes 15

Numbers of a Qwen3 beside the CPU's, random numbers and decisions bit by bit, the bridge in float64,
the engine's law against the exact one, tokens by every way that leads to them; then the rollout
benchmark, preset `h200`, in the time that is left. Exit code 1 where anything failed. What it shows
stands in docs/benchmarks.md. Without an accelerator the CPU is compared with itself.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
# JAX takes three quarters of a GPU, and the caches of the benchmark may come close to that.
MEMORY = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"}
CHECKS, SPEED = "checks.json", "bench_rollout.json"


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder for the results as JSON")
    parser.add_argument("--minutes", type=float, default=15.0, help="for everything together")
    parser.add_argument("--quick", action="store_true", help="small models and few rows")
    parser.add_argument("--only", nargs="+", default=[""], help="checks with one of these in it")
    parser.add_argument("--no-speed", action="store_true", help="correctness alone")
    parser.add_argument("--preset", default="h200", help="of the benchmark that follows")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """The exit code: 0 where every check passed and the benchmark, if asked for, ran through."""
    options = parse(arguments)
    deadline = time.monotonic() + 60 * options.minutes
    if options.no_speed:
        return check(options, deadline)
    given = sys.argv[1:] if arguments is None else arguments
    # Each in a process of its own: a TPU belongs to one process, and on a GPU the first keeps most
    # of the memory until it ends.
    correct = _child([str(HERE), *given, "--no-speed"], deadline)
    target = [] if options.out is None else ["--out", str(options.out / SPEED)]
    bench = [str(HERE.with_name("bench_rollout.py")), "--preset", options.preset, *target]
    fast = _child(bench, deadline)
    if fast == 0 and target:
        print(f"the table's figures: {target[1]}")
    return int(correct != 0 or fast != 0)


def _child(command: list[str], deadline: float) -> int:
    """Runs a script of ours until the deadline; its exit code, 1 where the time was over."""
    left = max(deadline - time.monotonic(), 1.0)
    environment = MEMORY | os.environ
    try:
        run = subprocess.run([sys.executable, *command], timeout=left, env=environment)
        return run.returncode
    except subprocess.TimeoutExpired:
        print(f"stopped, because the time was over: {' '.join(command)}", file=sys.stderr)
        return 1


def check(options: argparse.Namespace, deadline: float) -> int:
    """Makes the checks, prints a line for each, and writes them after every one."""
    # Not before the command line is read, and not in the process that only starts the others.
    from accelerator import bridges, findings, generation, laws, parity, randomness
    from bench import report

    chosen = setting(options.quick)
    checks: dict[str, Any] = {}
    for part in (randomness, bridges, parity, generation, laws):
        checks |= part.checks(chosen)
    checks = {n: one for n, one in checks.items() if any(words in n for words in options.only)}
    result = {
        "commit": report.commit(),
        "date": report.today(),
        "machine": report.machine(),
        "versions": report.versions(),
        "device": str(chosen.device),
        "reference": str(chosen.reference),
        "checks": [],
    }
    print(f"{chosen.device.device_kind} ({chosen.device}) against {chosen.reference}", flush=True)
    for row in findings.run(checks, deadline):
        print(findings.line(row), flush=True)
        result["checks"].append(row)
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
            (options.out / CHECKS).write_text(json.dumps(result, indent=1) + "\n")
    failed = [row["name"] for row in result["checks"] if not row["passed"]]
    print(f"{len(result['checks']) - len(failed)} of {len(result['checks'])} checks passed")
    return int(bool(failed) or not result["checks"])


def setting(quick: bool) -> Any:
    """The first device beside the last CPU device.

    Raises:
      SystemExit: JAX was told to leave the CPU out.
    """
    import jax
    from accelerator.findings import Setting

    device = jax.devices()[0]
    try:
        reference = jax.devices("cpu")[-1]
    except RuntimeError as error:
        raise SystemExit(
            f"the checks compare with a CPU device of the same process; JAX has none ({error}). "
            f"Set JAX_PLATFORMS={device.platform},cpu, or leave it unset"
        ) from error
    if not quick:
        return Setting(device, reference)
    return Setting(
        device, reference, layers=1, vocab=512, head_dims=(64,), wide_vocab=2048, law_rows=40_000,
        rows=12, response_length=48,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
