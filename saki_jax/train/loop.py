"""The training loop: set up, step, report.

    each step:  prompts -> rollout -> update -> metrics [-> evaluation] [-> probe] [-> checkpoint]

All randomness of a step follows from (seed, step), so a run that is continued from a checkpoint
makes the steps that it would have made.
"""

import json
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from saki_jax.rollout.batch import Rollout
from saki_jax.rollout.keys import step_key
from saki_jax.train import setup
from saki_jax.train.baselines import METHODS
from saki_jax.train.checkpoint import Checkpoints
from saki_jax.train.config import flatten
from saki_jax.train.evaluations import Evaluations
from saki_jax.train.metrics import MetricsWriter, not_measured, step_record
from saki_jax.train.probing import RunProbe
from saki_jax.train.progress import Reporter, summary_table
from saki_jax.train.rundir import RunDir, write_evidence, write_json
from saki_jax.train.schedule import epsilon_at
from saki_jax.train.setup import Session
from saki_jax.train.state import TrainState
from saki_jax.train.summary import summarise


class NotFiniteError(RuntimeError):
    """Too many steps in a row had a loss or gradient that is not finite."""


def run(config: ConfigDict, workdir: str | Path) -> dict[str, Any]:
    """Trains as `config` (validated) says in `workdir`; returns what summary.json holds.

    A folder with an unfinished run of the same configuration is continued from its newest complete
    checkpoint; a finished one is reported as such and left alone.

    Raises:
      ConfigError: the folder belongs to another run, or mesh and batch do not fit.
      DataError, TokenizerError, CheckpointError: a file is not what it must be.
      NotFiniteError: after `trainer.max_skips_in_row` steps that were not finite; it names the
        evidence.
    """
    folder = RunDir(workdir)
    with closing(folder), closing(Reporter(config.steps, quiet=jax.process_index() != 0)) as report:
        flat = flatten(config)
        continued = folder.claim(flat)
        if folder.summary.exists():
            summary = json.loads(folder.summary.read_text("utf-8"))
            report.show(summary_table(summary))
            report.say(f"the run in {folder.path} is finished; its figures: {folder.summary}")
            return summary
        session = setup.build(config)
        folder.begin(flat)
        with jax.set_mesh(session.pair.mesh):
            return _Run(config, session, folder, report).to_the_end(continued)


class _Run:
    """A run under way. Whatever a restart needs is in the folder or in the train state."""

    def __init__(self, config: ConfigDict, session: Session, folder: RunDir, report: Reporter):
        self.config = config
        self.session = session
        self.folder = folder
        self.report = report
        self.evaluations = Evaluations(folder.evaluations, report)
        self.probe: RunProbe | None = None
        if config.probe.path:
            self.probe = RunProbe(config, session.pair, folder.probe, report)
        self.keep_steps = tuple(config.checkpoint.keep_steps)
        self.checkpoints = Checkpoints(
            folder.checkpoints, keep=config.checkpoint.keep, keep_steps=self.keep_steps
        )

    def to_the_end(self, continued: bool) -> dict[str, Any]:
        """All steps that are left, then the summary."""
        with closing(self.checkpoints):
            state, done = self.start(continued)
            self.evaluations.teacher(self.session)
            if done == 0:
                self.evaluations.student(self.session, state.params, 0)
            metrics = MetricsWriter(self.folder.metrics, self.folder.tensorboard, done)
            with closing(metrics):
                for step in range(done + 1, self.config.steps + 1):
                    state, record = self.step(state, step)
                    metrics.write(record)
                    self.report.step_done(record)
                    if self.due(step, self.config.checkpoint.every) or step in self.keep_steps:
                        self.checkpoints.save(step, state, self.position(step))
        return self.finish()

    def start(self, continued: bool) -> tuple[TrainState, int]:
        """The state to go on from, and how many steps it has behind it."""
        restored = self.checkpoints.restore(self.session.template)
        if restored is not None:
            state, position = restored
            done = position["step"]
            self.session.batches.set_state(position["data"])
            self.report.say(f"continuing the run in {self.folder.path} after step {done}")
        else:
            state, done = self.session.initial(), 0
            if continued:
                self.report.say(f"{self.folder.path} has no checkpoint yet: starting with step 1")
        moved = self.folder.set_aside_after(done)
        if moved:
            self.report.say(f"steps behind it were set aside ({moved} lines of metrics)")
        return state, done

    def position(self, step: int) -> dict[str, Any]:
        """What a checkpoint holds beside the state."""
        data = self.session.batches.get_state()
        return {"step": step, "seed": self.config.seed, "data": data}

    def due(self, step: int, every: int) -> bool:
        """Whether what is done every so many steps (0 = never) and at the end is due."""
        return step == self.config.steps or (every > 0 and step % every == 0)

    def step(self, state: TrainState, step: int) -> tuple[TrainState, dict[str, Any]]:
        """One rollout, one update, and evaluation and probe where they are due."""
        seconds: dict[str, float] = {}
        key = step_key(self.config.seed, step)
        with timed(seconds, "rollout"):
            rollout = self.rollout(state, step, key)
        with timed(seconds, "extras"):
            extras, figures = jax.block_until_ready(self.session.extras(rollout, step))
        with timed(seconds, "update"):
            update = self.session.update(state, rollout, key, extras)
            state, stats = jax.block_until_ready(update)
        known_ids = self.session.pair.tokenizer.size
        record = step_record(step, rollout, stats, state, seconds, known_ids) | figures
        record |= dict.fromkeys(not_measured(METHODS[self.config.method]))
        if record["skipped_in_row"] >= self.config.trainer.max_skips_in_row:
            self.stop(rollout, record)
        if self.due(step, self.config.eval.every):
            with timed(seconds, "evaluation"):
                scores = self.evaluations.student(self.session, state.params, step)
            record |= {f"eval_{name}": value for name, value in scores.items() if "_at_" in name}
            record["seconds_evaluation"] = seconds["evaluation"]
        if self.probe and step in self.config.probe.steps:
            with timed(seconds, "probe"):
                record |= self.probe(self.session.copy(state.params), step)
            record["seconds_probe"] = seconds["probe"]
        return state, record

    def rollout(self, state: TrainState, step: int, key: jax.Array) -> Rollout:
        """The responses of a step, with epsilon 0 for methods that never guide."""
        session = self.session
        self.report.begin(f"step {step}")
        rollout = session.rollout(
            session.copy(state.params),
            session.pair.teacher_params,
            session.next_prompts(),
            epsilon_at(self.config.epsilon.to_dict(), step) if session.guided else 0.0,
            key,
            self.report.during,
        )
        # Laid out alike whichever program made it, so that the update is compiled once.
        return jax.block_until_ready(session.lay_out(rollout))

    def stop(self, rollout: Rollout, record: dict[str, Any]) -> None:
        """Leaves the batch on disk and ends the run."""
        evidence = write_evidence(self.folder.evidence, rollout, record)
        raise NotFiniteError(
            f"step {record['step']}: loss or gradient was not finite for "
            f"{record['skipped_in_row']} steps in a row (trainer.max_skips_in_row). The weights "
            f"are those from before them. The batch and its figures: {evidence}"
        )

    def finish(self) -> dict[str, Any]:
        """Writes summary.json, which marks the run as finished, and shows the table."""
        summary = summarise(self.config, self.folder)
        write_json(self.folder.summary, summary)
        self.report.show(summary_table(summary))
        self.report.say(f"all figures: {self.folder.summary}, {self.folder.metrics}")
        return summary


@contextmanager
def timed(seconds: dict[str, float], part: str) -> Iterator[None]:
    """Notes how long the block took under `part`."""
    began = time.monotonic()
    yield
    seconds[part] = time.monotonic() - began
