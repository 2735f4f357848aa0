"""What the tables compare: methods at student sizes, each from its folders of evaluations."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from saki_jax.evals import bootstrap, results
from saki_jax.evals.bootstrap import Estimate
from saki_jax.evals.folder import EvaluationFolder, read_json

METHOD_TITLES = {
    "opd": "OPD",
    "exopd": "ExOPD",
    "skd": "SKD",
    "trb": "TRB",
    "random_tm": "Random-TM",
    "tv_weighted_tm": "TV-weighted-TM",
    "teacher_sampled": "Teacher-sampled",
    "saki": "SAKI",
}
SAME_PROTOCOL = (
    "samples",
    "max_new_tokens",
    "end_ids",
    "mask_unused_rows",
    "template",
    "instruction",
    "enable_thinking",
    "grader",
)
"""Settings that folders in one table must share."""

AVERAGE = "Average"


class TablesError(ValueError):
    """Folders that cannot stand in one table; the message says in what they differ."""


@dataclass(frozen=True)
class Entry:
    """One method at one student size.

    Attributes:
      method: its key.
      student: its size.
      runs: summaries of its evaluations, one a training seed.
    """

    method: str
    student: str
    runs: tuple[Mapping[str, Any], ...]

    @property
    def title(self) -> str:
        """The method as tables write it."""
        return METHOD_TITLES.get(self.method, self.method)

    def sets(self) -> list[str]:
        """Sets that every run was evaluated on."""
        common = set.intersection(*(set(run["sets"]) for run in self.runs))
        return [name for name in self.runs[0]["sets"] if name in common]

    def values(self, name: str, figure: str) -> dict[str, float]:
        """{problem id: per cent}, averaged over the runs."""
        runs = [results.by_problem(run["sets"][name], figure) for run in self.runs]
        if any(run.keys() != runs[0].keys() for run in runs):
            raise TablesError(
                f"the runs of {self.title} {self.student} differ in problems of {name}"
            )
        return {p: 100.0 * float(np.mean([run[p] for run in runs])) for p in runs[0]}

    def estimate(self, name: str, figure: str, sets: Sequence[str]) -> Estimate | None:
        """A set's figure or the average's; None where a set is missing."""
        if name == AVERAGE:
            if not set(sets) <= set(self.sets()):
                return None
            per_set = {s: np.array(list(self.values(s, figure).values())) for s in sets}
            return bootstrap.macro_interval(per_set)
        if name not in self.sets():
            return None
        values = np.array(list(self.values(name, figure).values()))
        return bootstrap.mean_interval(values, seed=bootstrap.set_seed(0, name))

    def spread(self, figure: str, sets: Sequence[str]) -> float | None:
        """Standard deviation over runs of the average, in points; None for a single run."""
        if len(self.runs) < 2 or not set(sets) <= set(self.sets()):
            return None
        averages = [replace(self, runs=(run,)).estimate(AVERAGE, figure, sets) for run in self.runs]
        return float(np.std([a.value for a in averages], ddof=1))

    def minus(self, other: "Entry", figure: str, sets: Sequence[str]) -> Estimate | None:
        """Paired difference of the averages; None where either lacks a set."""
        if not set(sets) <= set(self.sets()) & set(other.sets()):
            return None
        mine, theirs = ({s: e.values(s, figure) for s in sets} for e in (self, other))
        return bootstrap.paired_macro_difference(mine, theirs)


def read_entries(arguments: Sequence[str]) -> list[Entry]:
    """Entries from arguments ``[METHOD[@STUDENT]=]DIR``, in the paper's order of methods.

    Raises:
      TablesError: when the folders were not evaluated alike.
      FolderError: when one is not the folder of an evaluation.
    """
    grouped: dict[tuple[str, str], list[dict]] = {}
    first: tuple[str, dict] | None = None
    for argument in arguments:
        label, equals, path = argument.rpartition("=")
        summary = read_json(EvaluationFolder(path).summary)
        protocol = summary["protocol"]
        method, _, student = label.partition("@") if equals else ("", "", "")
        key = (method or protocol["method"], student or protocol["student"])
        first = first or (path, protocol)
        _refuse_other_protocol(first, (path, protocol))
        grouped.setdefault(key, []).append(summary)
    entries = [Entry(*key, tuple(runs)) for key, runs in grouped.items()]
    order = list(METHOD_TITLES)
    rank = {m: order.index(m) if m in order else -1 for m, _ in grouped}
    students = list(dict.fromkeys(student for _, student in grouped))
    return sorted(entries, key=lambda e: (students.index(e.student), rank[e.method]))


def _refuse_other_protocol(first: tuple[str, Mapping], this: tuple[str, Mapping]) -> None:
    differ = [k for k in SAME_PROTOCOL if first[1].get(k) != this[1].get(k)]
    if differ:
        told = "; ".join(f"{k}: {first[1].get(k)!r} and {this[1].get(k)!r}" for k in differ)
        raise TablesError(
            f"{first[0]} and {this[0]} were not evaluated alike ({told}); evaluate again, or make "
            "separate tables"
        )
