"""The fixed-prefix probe inside a run (Appendix E), at the steps that `probe.steps` names.

    probe/step_000050.npz    every position's figures, as `evals.probe compare` reads them
    probe/step_000050.json   prompt-equal means with their intervals

The probe itself is a file of `python -m saki_jax.evals.probe build`, the same for all runs that are
to be compared. Measuring draws nothing, so a run with a probe takes the steps of one without.
"""

from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from saki_jax.evals import checkpoint, probe_compare, probe_file, probe_measure
from saki_jax.evals.probe_compare import GROUPS
from saki_jax.evals.probe_file import Probe
from saki_jax.train.config import ConfigError
from saki_jax.train.pair import Pair
from saki_jax.train.progress import Reporter
from saki_jax.train.rundir import write_json

Measured = dict[str, float]  # probe_<group>_<figure>: prompt-equal mean

ROWS = 4  # sequences a pass, at least; rounded up to what the devices share


class RunProbe:
    """Measures the student of a run; what has been measured is read again.

    Args:
      config: of the run; `probe.path` names the file.
      pair: its models.
      folder: where results go.
      report: says what was found.

    Raises:
      ProbeError: the file is missing or no probe.
      ConfigError: see `check_origin`.
    """

    def __init__(self, config: ConfigDict, pair: Pair, folder: Path, report: Reporter):
        self.probe = probe_file.load(config.probe.path)
        check_origin(self.probe, config)
        self._pair = pair
        self._folder = folder
        self._report = report
        shards = pair.mesh.shape["data"] * pair.mesh.shape["fsdp"]
        self._measure = probe_measure.make_measure(
            pair.student, pair.teacher, rows=-(-ROWS // shards) * shards, mesh=pair.mesh
        )

    def __call__(self, student_params: Any, step: int) -> Measured:
        """The figures after `step` steps, for the step's line of metrics."""
        file = self._folder / f"step_{step:06d}.npz"
        if file.exists():
            found, _ = probe_measure.load_figures(file, self.probe)
        else:
            found = self._measure(self.probe, student_params, self._pair.teacher_params)
            if jax.process_index() == 0:
                probe_measure.save_figures(file, self.probe, found, {"step": step})
        levels = {group: probe_compare.levels(self.probe, found, group=group) for group in GROUPS}
        told = {
            group: {name: each.to_json() for name, each in figures.items()}
            for group, figures in levels.items()
        }
        if jax.process_index() == 0 and not file.with_suffix(".json").exists():
            write_json(file.with_suffix(".json"), {"step": step, "groups": told})
        values = {
            f"probe_{group}_{name}": each.value
            for group, figures in levels.items()
            for name, each in figures.items()
        }
        self._report.say(
            f"probe after step {step}: C1 {values['probe_all_c1']:.2f} %, "
            f"C16 − C1 {values['probe_all_c16_minus_c1']:.2f} %, "
            f"KL(T‖S) {values['probe_all_kl']:.3f} ({len(self.probe)} positions)"
        )
        return values


def check_origin(probe: Probe, config: ConfigDict) -> None:
    """Refuses a probe that another student or teacher made, or another masking of the head.

    Raises:
      ConfigError: naming both sides.
    """
    for role in ("student", "teacher"):
        here = checkpoint.find(config[role]).identify()
        there = probe.meta[role]
        if here["weights"] != there["weights"]:
            raise ConfigError(
                f"probe.path: {config.probe.path} was built with the {role} {there['checkpoint']}, "
                f"whose weights are not those of {role}={config[role]}; build one for this pair "
                "(python -m saki_jax.evals.probe build)"
            )
    masked = probe.meta.get("mask_unused_rows", False)
    if masked != config.mask_unused_rows:
        raise ConfigError(
            f"probe.path: {config.probe.path} was built with mask_unused_rows={masked}, the run "
            f"has {config.mask_unused_rows}; their probabilities are not over the same tokens"
        )
