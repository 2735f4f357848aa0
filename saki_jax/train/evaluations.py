"""Evaluations of a run: each made once, kept in the run's folder, read again from there."""

import json
from pathlib import Path
from typing import Any

import jax

from saki_jax.evals.responses import to_record
from saki_jax.train.progress import Reporter
from saki_jax.train.rundir import write_json, write_lines
from saki_jax.train.setup import Session
from saki_jax.train.tasks import Evaluator

Figures = dict[str, Any]


def file_name(step: int | None) -> str:
    """Name of the evaluation of the student after so many steps, or of the teacher (None)."""
    return "teacher.json" if step is None else f"student_{step:06d}.json"


class Evaluations:
    """Makes evaluations in `folder`; what is there already is not made again."""

    def __init__(self, folder: Path, report: Reporter):
        self._folder = folder
        self._report = report

    def teacher(self, session: Session) -> Figures:
        """The teacher's figures; {} where they are not asked for."""
        return self._figures(session.evaluate_teacher, session.pair.teacher_params, None)

    def student(self, session: Session, masters: Any, step: int) -> Figures:
        """The figures of the student alone after `step` steps; {} where there are no problems."""
        return self._figures(session.evaluate_student, session.copy(masters), step)

    def _figures(self, evaluate: Evaluator | None, weights: Any, step: int | None) -> Figures:
        if evaluate is None:
            return {}
        file = self._folder / file_name(step)
        if file.exists():
            return json.loads(file.read_text("utf-8"))
        who = "the teacher" if step is None else f"the student after step {step}"
        self._report.begin(f"evaluation of {who}")
        scores = evaluate(weights, self._report.during)
        figures = {"step": step, **scores.summary()}
        if jax.process_index() == 0:
            write_lines(file.with_suffix(".responses.jsonl"), map(to_record, scores.responses))
            write_json(file, figures)
        k = scores.samples
        self._report.say(
            f"{who}: Mean@{k} {scores.mean_at_k:.1%}, Pass@{k} {scores.pass_at_k:.1%} "
            f"({scores.problems} problems)"
        )
        return figures


def read(folder: Path, step: int | None) -> Figures | None:
    """The figures of an evaluation that was made, or None."""
    file = folder / file_name(step)
    return json.loads(file.read_text("utf-8")) if file.exists() else None
