"""The fixed-prefix probe of a comparison: built once, every finished run measured there."""

from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp

from replication.runs import Plan
from saki_jax.evals import checkpoint, probe, probe_file, probe_measure
from saki_jax.evals.checkpoint import Subject
from saki_jax.evals.probe_file import Probe
from saki_jax.evals.probe_measure import Figures

TOP = 4
"""In place of the paper's 16: the task's vocabulary has 16 tokens, of which 16 are always all."""


def measure_all(
    plan: Plan, epsilon: float, positions: int
) -> tuple[Probe, dict[tuple[str, int], Figures]]:
    """The probe with the initial student's figures, and the figures of every run's last weights.

    The probe is that of Appendix E, from the initial student at `epsilon`, with `positions`
    corrections and as many accepted positions. What has been measured is read again.
    """
    file = plan.workdir / "probe.npz"
    run = plan.folder(*next(plan.pairs()))
    if not file.exists():
        told = ["build", "--run", str(run), "--out", str(file)]
        told += ["--positions", str(positions), "--epsilon", str(epsilon)]
        if probe.main(told):
            raise probe_file.ProbeError(f"{file} could not be built; the reason stands above")
    frozen = probe_file.load(file)
    student, teacher = (_load(frozen.meta[name]["checkpoint"]) for name in ("student", "teacher"))
    measure = probe_measure.make_measure(student.model, teacher.model, top=TOP)
    frozen = replace(frozen, initial=measure(frozen, student.params, teacher.params))
    found = {}
    for method, seed in plan.pairs():
        kept = plan.workdir / "probes" / f"{method}-{seed}.npz"
        if not kept.exists():
            trained = _load(plan.folder(method, seed))
            figures = measure(frozen, trained.params, teacher.params)
            told = {"subject": trained.source.identify(), "top": TOP}
            probe_measure.save_figures(kept, frozen, figures, told)
        found[method, seed], _ = probe_measure.load_figures(kept, frozen)
    return frozen, found


def _load(path: str | Path) -> Subject:
    return checkpoint.load(checkpoint.find(path), dtype=jnp.float32)
