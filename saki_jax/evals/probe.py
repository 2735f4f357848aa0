"""The fixed-prefix probe (Appendix E) as a command.

    python -m saki_jax.evals.probe build --run RUN --out probe.npz
    python -m saki_jax.evals.probe measure probe.npz --checkpoint RUN --step 200 --out saki.npz
    python -m saki_jax.evals.probe compare probe.npz trb=trb.npz saki=saki.npz --out DIR

`build` takes the initial student, the teacher and the prompts that the run's config.json names, and
freezes prefixes in a file; it can do without a run (--student, --teacher, --data). `measure` reads
what a checkpoint says there. `compare` makes tables; several files of one name are seeds.
"""

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from saki_jax.data.prompts import DataError
from saki_jax.data.template import TEMPLATES
from saki_jax.evals import checkpoint, probe_build, probe_compare, probe_file, probe_measure
from saki_jax.evals.checkpoint import Subject, SubjectError
from saki_jax.evals.folder import write_json
from saki_jax.evals.probe_compare import GROUPS
from saki_jax.evals.probe_file import Probe, ProbeError
from saki_jax.evals.probe_settings import encode, settings_of
from saki_jax.evals.tables import write_tables
from saki_jax.models.compatibility import check_pair
from saki_jax.models.hf import CheckpointError
from saki_jax.models.qwen3 import default_compute_dtype
from saki_jax.models.sharding import make_mesh
from saki_jax.models.tokenizer import TokenizerError
from saki_jax.rollout.engine import make_rollout
from saki_jax.rollout.keys import step_key
from saki_jax.rollout.spec import RolloutSpec

_TOLD = (ProbeError, SubjectError, DataError, CheckpointError, TokenizerError)
_PROBE_STEP = 0  # of the keys: training steps count from 1, so no training draw is repeated

PAPER = {"positions": 1024, "epsilon": 0.02}


def build_command(options: argparse.Namespace) -> None:
    """Builds and freezes a probe, with the initial student's figures in it."""
    if Path(options.out).exists():
        raise ProbeError(f"{options.out} exists; a probe is frozen, so choose another name")
    settings = settings_of(options)
    masked = settings["mask_unused_rows"]
    student, teacher = (
        _load(settings[role], options, masked=masked) for role in ("student", "teacher")
    )
    check_pair(student.config, teacher.config, student.tokenizer, teacher.tokenizer)
    ends = settings["end_ids"] or sorted({*student.end_ids, *teacher.end_ids})
    spec = RolloutSpec(
        response_length=settings["response_length"],
        end_ids=tuple(ends),
        pad_id=student.tokenizer.pad_id,
        block_size=settings["block_size"],
        slots=options.slots,
    )
    mesh = _mesh(options)
    probe = probe_build.build(
        make_rollout(student.model, teacher.model, spec, mesh),
        student.params,
        teacher.params,
        encode(settings, student),
        epsilon=options.epsilon,
        key=step_key(options.seed, _PROBE_STEP),
        count=options.positions,
        samples=options.samples,
        prompts_per_batch=options.batch_prompts,
        meta={
            "student": student.source.identify(),
            "teacher": teacher.source.identify(),
            "epsilon": options.epsilon,
            "seed": options.seed,
            "samples": options.samples,
            "mask_unused_rows": masked,
        },
    )
    measure = probe_measure.make_measure(student.model, teacher.model, mesh=mesh)
    initial = measure(probe, student.params, teacher.params)
    probe = replace(probe, initial=initial)
    probe_file.save(options.out, probe)
    print(_levels({"initial student": initial}, probe))
    print(f"{len(probe)} positions over {len(probe.prompt_ids)} prompts: {options.out}")


def measure_command(options: argparse.Namespace) -> None:
    """Measures one checkpoint at a probe's prefixes."""
    probe = probe_file.load(options.probe)
    if Path(options.out).exists():
        raise ProbeError(f"{options.out} exists and is not overwritten; choose another name")
    masked = probe.meta.get("mask_unused_rows", False)
    teacher = _load(options.teacher or probe.meta["teacher"]["checkpoint"], options, masked=masked)
    if teacher.source.identify()["weights"] != probe.meta["teacher"]["weights"]:
        raise ProbeError(
            f"the teacher {teacher.source.folder} is not the one of the probe "
            f"({probe.meta['teacher']['checkpoint']}): KL(T||S) would not be comparable"
        )
    student = _load(options.checkpoint, options, step=options.step, masked=masked)
    if student.masked != masked:
        raise ProbeError(
            f"{options.checkpoint} was trained with mask_unused_rows, the probe was built without: "
            "their probabilities are not over the same tokens; build another probe"
        )
    check_pair(student.config, teacher.config, student.tokenizer, teacher.tokenizer)
    measure = probe_measure.make_measure(student.model, teacher.model, mesh=_mesh(options))
    found = measure(probe, student.params, teacher.params)
    probe_measure.save_figures(options.out, probe, found, {"subject": student.source.identify()})
    print(_levels({student.source.identity["method"]: found}, probe))


def compare_command(options: argparse.Namespace) -> None:
    """Prints and writes the tables of several measurements."""
    probe = probe_file.load(options.probe)
    files: dict[str, list[str]] = {}
    for argument in options.measurements:
        name, equals, path = argument.partition("=")
        if not equals:
            raise ProbeError(f"{argument!r}: measurements are given as NAME=FILE")
        files.setdefault(name, []).append(path)
    reference = options.reference or next(iter(files))
    if reference not in files:
        raise ProbeError(f"the reference {reference!r} is none of {', '.join(files)}")
    runs = {
        name: probe_compare.average_runs([probe_measure.load_figures(p, probe)[0] for p in paths])
        for name, paths in files.items()
    }
    tables, found = [], []
    for group in GROUPS:
        means = {name: probe_compare.levels(probe, run, group=group) for name, run in runs.items()}
        tables.append(probe_compare.levels_table(means, group))
        comparisons = [
            probe_compare.compare(probe, run, runs[reference], names=(name, reference), group=group)
            for name, run in runs.items()
            if name != reference
        ]
        if comparisons:
            tables.append(probe_compare.difference_table(comparisons))
        found += [c.to_json() for c in comparisons]
    print("\n".join(table.to_markdown() for table in tables))
    if options.out:
        write_tables(options.out, tables)
        write_json(Path(options.out) / "comparisons.json", found)


def _levels(found: dict[str, probe_measure.Figures], probe: Probe) -> str:
    return "\n".join(
        probe_compare.levels_table(
            {name: probe_compare.levels(probe, each, group=group) for name, each in found.items()},
            group,
        ).to_markdown()
        for group in GROUPS
    )


def _load(
    path: str, options: argparse.Namespace, *, step: int = 0, masked: bool = False
) -> Subject:
    dtype = default_compute_dtype() if options.dtype == "auto" else options.dtype
    source = checkpoint.find(path, step=step)
    return checkpoint.load(source, dtype=jnp.dtype(dtype), mesh=_mesh(options), masked=masked)


def _mesh(options: argparse.Namespace) -> Any:
    return make_mesh(*json.loads(f"[{options.mesh}]"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one of the three commands; 1 with a message when it cannot be done."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    options = _parser().parse_args(arguments)
    try:
        options.command(options)
    except _TOLD as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m saki_jax.evals.probe",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="build|measure|compare")
    models = argparse.ArgumentParser(add_help=False)
    models.add_argument("--teacher", default="", metavar="DIR")
    models.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    models.add_argument("--mesh", default="1,1,1", help="sizes of data,fsdp,tensor")

    build = commands.add_parser("build", parents=[models], help="freeze prefixes")
    build.add_argument("--out", required=True, metavar="FILE.npz")
    build.add_argument("--run", default="", metavar="RUN", help="folder of a run: its settings")
    build.add_argument("--student", default="", metavar="DIR", help="the initial student")
    build.add_argument("--data", default="", metavar="FILE", help="prompts")
    build.add_argument("--addition", type=int, default=0, help="held-out problems of that task")
    build.add_argument("--template", default="", choices=("", *TEMPLATES))
    build.add_argument("--instruction", default=None, help="appended to questions; '' = nothing")
    build.add_argument(
        "--mask-unused-rows", action="store_true", help="no mass on ids beyond the tokenizer"
    )
    build.add_argument("--positions", type=int, default=PAPER["positions"], help="corrections")
    build.add_argument("--epsilon", type=float, default=PAPER["epsilon"])
    build.add_argument("--samples", type=int, default=1, help="responses a prompt")
    build.add_argument("--response-length", type=int, default=0)
    build.add_argument("--batch-prompts", type=int, default=64)
    build.add_argument("--slots", type=int, default=0, help="rows at a time, 0 = all")
    build.add_argument("--seed", type=int, default=0)
    build.set_defaults(command=build_command)

    measure = commands.add_parser("measure", parents=[models], help="measure a checkpoint")
    measure.add_argument("probe", metavar="PROBE.npz")
    measure.add_argument("--checkpoint", required=True, metavar="DIR")
    measure.add_argument("--step", type=int, default=0, help="of a run's checkpoints, 0 = newest")
    measure.add_argument("--out", required=True, metavar="FILE.npz")
    measure.set_defaults(command=measure_command)

    compare = commands.add_parser("compare", help="tables of several measurements")
    compare.add_argument("probe", metavar="PROBE.npz")
    compare.add_argument("measurements", nargs="+", metavar="NAME=FILE.npz")
    compare.add_argument("--reference", default="", help="default: the first name")
    compare.add_argument("--out", default="", metavar="DIR")
    compare.set_defaults(command=compare_command)
    return parser


if __name__ == "__main__":
    sys.exit(main())
