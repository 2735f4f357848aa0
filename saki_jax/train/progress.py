"""What the person at the terminal sees: a live line while a step runs, and the table at the end."""

import sys
import time
from io import TextIOBase
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from saki_jax.rollout import loop

_QUIET_SECONDS = 15.0  # without a terminal, a rollout says something this often


class Reporter:
    """Progress of a run on the terminal, or as plain lines where there is none.

    Args:
      steps: of the whole run.
      stream: where to write, standard output by default.
      quiet: say nothing (processes other than the first).
    """

    def __init__(self, steps: int, *, stream: TextIOBase | None = None, quiet: bool = False):
        self.console = Console(file=stream or sys.stdout, quiet=quiet, highlight=False)
        self.live = self.console.is_terminal and not quiet
        self._steps = steps
        self._what = ""
        self._quiet_seconds = _QUIET_SECONDS
        self._began = self._said = time.monotonic()
        self._bar: Progress | None = None
        self._task = None
        if self.live:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=20),
                TextColumn("{task.completed}/{task.total}"),
                TextColumn("{task.fields[figures]}"),
                TimeRemainingColumn(),
                console=self.console,
            )
            self._bar.start()
            self._task = self._bar.add_task("", total=steps, figures="")

    def say(self, text: str) -> None:
        """A line that stays."""
        self.console.print(text, markup=False, soft_wrap=True)

    def show(self, table: Table) -> None:
        """A table, in place of the live display."""
        self.close()
        self.console.print(table)

    def begin(self, what: str) -> None:
        """Names the rollout that starts now ("step 3", "evaluation")."""
        self._what = what
        self._began = self._said = time.monotonic()

    def during(self, progress: loop.Progress) -> None:
        """`on_progress` of rollouts and evaluations."""
        now = time.monotonic()
        if self._bar is None and now - self._said < self._quiet_seconds:
            return
        rate = progress.committed / max(now - self._began, 1e-9)
        figures = (
            f"{self._what}: rows {progress.rows_done}/{progress.rows_total}  "
            f"{rate:,.0f} tokens/s  "
            f"corrections {_share(progress.corrections, progress.committed)}"
        )
        if self._bar is not None:
            self._bar.update(self._task, figures=figures)
        else:
            self._said = now
            self.say(f"  {figures}")

    def step_done(self, record: dict[str, Any]) -> None:
        """One line a step, or the bar moved on."""
        line = (
            f"epsilon {_number(record['epsilon'])}  loss {record['loss']:+.4f}  "
            f"corrections {record['correction_rate']:.2%}  "
            f"length {record['response_length']:.1f}  "
            f"{record['tokens_per_second']:,.0f} tokens/s"
        )
        if self._bar is None:
            self.say(f"step {record['step']}/{self._steps}  {line}")
        else:
            self._bar.update(self._task, completed=record["step"], description="step", figures=line)

    def close(self) -> None:
        """Ends the live display."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.2%}" if whole else "-"


def summary_table(summary: dict[str, Any]) -> Table:
    """The figures of summary.json for the terminal. It reports one run and ranks nothing."""
    k = summary["samples"]
    mean, passed = f"mean_at_{k}", f"pass_at_{k}"
    title = f"{summary['method']}, seed {summary['seed']}, {summary['steps']} steps"
    table = Table(title=title, caption=summary["note"] or None, caption_justify="left")
    table.add_column("")
    for head in (f"Mean@{k}", f"Pass@{k}"):
        table.add_column(head, justify="right")
    for name in ("teacher", "student_before", "student_after"):
        scores = summary[name]
        row = [f"{scores[key]:.1%}" if scores else "-" for key in (mean, passed)]
        table.add_row(name.replace("_", ", "), *row)
    table.add_section()
    for name, label in (("epsilon_above_0", "epsilon > 0"), ("epsilon_0", "epsilon = 0")):
        rate = summary["correction_rate"][name]
        table.add_row(f"corrections while {label}", "-" if rate is None else f"{rate:.2%}", "")
    return table
