"""Comparing runs at the probe's prefixes (Appendix E).

Positions are averaged within each prompt first; prompts then weigh equally. Runs are compared by
paired differences, with 95 % intervals from redrawn prompts. Quartiles Q1..Q4 are of the positions,
by the KL(T || S) that the initial student had there; within each, again prompts weigh equally. The
interaction Q4 - Q1 says whether two runs differ more where the initial student was farther away.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from saki_jax.evals import bootstrap
from saki_jax.evals.bootstrap import Estimate
from saki_jax.evals.probe_file import Probe, ProbeError
from saki_jax.evals.probe_measure import FIGURES, Figures
from saki_jax.evals.table import Table

QUARTILES = ("Q1", "Q2", "Q3", "Q4")
INTERACTION = "Q4-Q1"
GROUPS = ("all", "corrected", "accepted")
UNITS = {"c1": 100.0, "c16": 100.0, "c16_minus_c1": 100.0, "kl": 1.0, "entropy": 1.0}
"""Shares are shown in percentage points, the others in nats."""

_TITLES = {
    "c1": "C1 %",
    "c16": "C16 %",
    "c16_minus_c1": "C16 − C1 %",
    "kl": "KL(T‖S)",
    "entropy": "H(S)",
}


@dataclass(frozen=True)
class Comparison:
    """One run against the reference, in one group of positions.

    Attributes:
      run, reference: their names.
      group: one of `GROUPS`.
      levels: {figure: (run, reference)}, prompt-equal means.
      difference: {figure: run - reference}.
      quartiles: {figure: {Q1..Q4 and Q4-Q1: run - reference}}.
    """

    run: str
    reference: str
    group: str
    levels: dict[str, tuple[Estimate, Estimate]]
    difference: dict[str, Estimate]
    quartiles: dict[str, dict[str, Estimate]]

    def to_json(self) -> dict:
        """All of it as a JSON object, in the units of `UNITS`."""
        return {
            "run": self.run,
            "reference": self.reference,
            "group": self.group,
            "figures": {
                name: {
                    "run": self.levels[name][0].to_json(),
                    "reference": self.levels[name][1].to_json(),
                    "difference": self.difference[name].to_json(),
                    "quartiles": {q: e.to_json() for q, e in self.quartiles[name].items()},
                }
                for name in FIGURES
            },
        }


def quartile_of(initial_kl: np.ndarray) -> np.ndarray:
    """The quartile 0..3 of each position by rank; equal values in the order of the file.

    >>> quartile_of(np.array([3.0, 1.0, 2.0, 4.0]))
    array([2, 0, 1, 3])
    """
    order = np.argsort(initial_kl, kind="stable")
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    return rank * 4 // len(order)


def compare(
    probe: Probe,
    run: Figures,
    reference: Figures,
    *,
    names: tuple[str, str],
    group: str = "all",
    resamples: int = bootstrap.RESAMPLES,
    seed: int = 0,
) -> Comparison:
    """Compares two measurements of one probe.

    Args:
      probe: with the initial student's figures.
      run, reference: {figure: [n]}.
      names: of both.
      group: which positions: "all", "corrected" or "accepted". Quartiles are of the group.
      resamples, seed: of the bootstrap; all figures see the same redrawn prompts.

    Raises:
      ProbeError: a value is not finite, or the group has fewer than four positions.
    """
    inside = _inside(probe, group)
    if inside.sum() < 4:
        raise ProbeError(f"the probe has {inside.sum()} positions of the group {group!r}, not 4")
    prompt = probe.prompt[inside].tolist()
    quartile = quartile_of(probe.initial["kl"][inside])
    masks = [np.ones(len(quartile), bool), *(quartile == q for q in range(4))]
    columns = {}
    for name in FIGURES:
        pair = [
            _finite(found[name], whose)[inside] * UNITS[name]
            for found, whose in zip((run, reference), names, strict=True)
        ]
        columns[name, "run"], columns[name, "reference"] = pair
        for label, mask in zip(("difference", *QUARTILES), masks, strict=True):
            columns[name, label] = np.where(mask, pair[0] - pair[1], np.nan)
    _, means = bootstrap.cluster_means(prompt, np.stack(list(columns.values()), axis=1))
    redrawn = bootstrap.resampled_means(means, resamples=resamples, seed=seed)
    draws = dict(zip(columns, redrawn.T, strict=True))
    values = dict(zip(columns, means.T, strict=True))

    def estimate(key: tuple[str, str]) -> Estimate:
        there = values[key][~np.isnan(values[key])]
        return bootstrap.percentile_interval(there.mean(), draws[key], len(there))

    def interaction(name: str) -> Estimate:
        high, low = (name, "Q4"), (name, "Q1")
        value = np.nanmean(values[high]) - np.nanmean(values[low])
        clusters = int((~np.isnan(values[high]) | ~np.isnan(values[low])).sum())
        return bootstrap.percentile_interval(value, draws[high] - draws[low], clusters)

    return Comparison(
        run=names[0],
        reference=names[1],
        group=group,
        levels={n: (estimate((n, "run")), estimate((n, "reference"))) for n in FIGURES},
        difference={n: estimate((n, "difference")) for n in FIGURES},
        quartiles={
            n: {q: estimate((n, q)) for q in QUARTILES} | {INTERACTION: interaction(n)}
            for n in FIGURES
        },
    )


def levels(probe: Probe, found: Figures, *, group: str = "all") -> dict[str, Estimate]:
    """Prompt-equal means of one measurement, in the units of `UNITS`."""
    inside = _inside(probe, group)
    columns = np.stack([_finite(found[n], "this run")[inside] * UNITS[n] for n in FIGURES], axis=1)
    _, means = bootstrap.cluster_means(probe.prompt[inside].tolist(), columns)
    draws = bootstrap.resampled_means(means)
    return {
        name: bootstrap.percentile_interval(means[:, i].mean(), draws[:, i], len(means))
        for i, name in enumerate(FIGURES)
    }


def average_runs(runs: Sequence[Figures]) -> Figures:
    """Runs of one method with different seeds, averaged position by position."""
    return {name: np.mean([run[name] for run in runs], axis=0) for name in FIGURES}


def levels_table(found: Mapping[str, Mapping[str, Estimate]], group: str) -> Table:
    """A row a run: prompt-equal means."""
    rows = tuple((name, *(each[f] for f in FIGURES)) for name, each in found.items())
    return Table(
        f"probe_{group}",
        f"Fixed-prefix probe, {_group_title(group)}",
        ("run", *_TITLES.values()),
        rows,
        "Prompt-equal means with 95 % intervals from redrawn prompts.",
        digits=2,
    )


def difference_table(comparisons: Sequence[Comparison]) -> Table:
    """A row a run and figure: the difference to the reference, by quartile, and Q4 - Q1."""
    first = comparisons[0]
    rows = tuple(
        (
            c.run,
            _TITLES[name],
            c.difference[name],
            *(c.quartiles[name][q] for q in (*QUARTILES, INTERACTION)),
        )
        for c in comparisons
        for name in FIGURES
    )
    return Table(
        f"probe_{first.group}_minus_{first.reference}",
        f"Fixed-prefix probe, {_group_title(first.group)}: run minus {first.reference}",
        ("run", "figure", "difference", *QUARTILES, "Q4 − Q1"),
        rows,
        "Paired by position, averaged within each prompt first; quartiles by the initial student's "
        "KL(T‖S). Points for shares, nats for KL and H.",
        digits=2,
    )


def _group_title(group: str) -> str:
    return {"all": "all positions"}.get(group, f"{group} positions")


def _inside(probe: Probe, group: str) -> np.ndarray:
    if group not in GROUPS:
        raise ProbeError(f"no group {group!r}; expected one of {', '.join(GROUPS)}")
    return {
        "all": np.ones(len(probe), bool),
        "corrected": probe.corrected,
        "accepted": ~probe.corrected,
    }[group]


def _finite(values: np.ndarray, name: str) -> np.ndarray:
    bad = int((~np.isfinite(values)).sum())
    if bad:
        raise ProbeError(
            f"{bad} of {len(values)} values of {name} are not finite: the model emitted NaN, or "
            "has probability 0 where the teacher has some"
        )
    return values.astype(np.float64)
