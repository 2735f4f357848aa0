"""What the finished runs of a comparison found, as one JSON object."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from replication.runs import Plan, read_lines
from replication.statistics import estimates, smallest_difference
from saki_jax.evals import bootstrap
from saki_jax.evals.grade import Verdict
from saki_jax.evals.probe_file import Probe
from saki_jax.evals.probe_measure import Figures
from saki_jax.train.schedule import epsilon_at

REFERENCE = "saki"
GUIDED_PHASES = 3  # equal parts of the steps with epsilon > 0
OWN = ("method", "seed", "student", "teacher")  # of a run, or of a machine
PROBE_FIGURES = ("c1", "c16", "c16_minus_c1")
PROBE_GROUPS = ("corrected", "accepted")


def collect(plan: Plan, probe: Probe, measured: dict[tuple[str, int], Figures]) -> dict[str, Any]:
    """All figures of the comparison; shares and differences in percent or percentage points."""
    config = json.loads((plan.folder(*next(plan.pairs())) / "config.json").read_text("utf-8"))
    reference = REFERENCE if REFERENCE in plan.methods else plan.methods[0]
    return {
        "methods": list(plan.methods),
        "seeds": list(plan.seeds),
        "reference": reference,
        "config": {name: value for name, value in config.items() if name not in OWN},
        "scores": _scores(plan, config["steps"], config["eval.samples"], reference),
        "probe": {
            "positions": len(probe),
            "prompts": len(probe.prompt_ids),
            "epsilon": probe.meta["epsilon"],
            "groups": {
                group: _probe_group(plan, probe, measured, group, reference)
                for group in PROBE_GROUPS
            },
        },
        "phases": {method: _phases(plan, config, method) for method in plan.methods},
        "seconds": sum(_summary(plan, *pair)["seconds"] for pair in plan.pairs()),
    }


def _scores(plan: Plan, last: int, samples: int, reference: str) -> dict[str, Any]:
    """Mean@k and Pass@k before and after, by method, and what each has more than the reference."""
    after = [[_right(plan.folder(m, s), last) for m in plan.methods] for s in plan.seeds]
    before = _right(plan.folder(*next(plan.pairs())), 0)
    counts = np.array([[[m[p] for m in row] for p in before] for row in after])  # [S, n, M]
    start = np.array([list(before.values())]).T[None]  # [1, n, 1]
    found: dict[str, Any] = {"problems": len(before), "samples": samples}
    for name, share in (("mean", lambda c: 100 * c / samples), ("pass", lambda c: 100.0 * (c > 0))):
        values = share(counts)
        found[name] = {
            "before": estimates(share(start))[0].to_json(),
            **_by_method(plan, values, reference),
            "by_seed": {
                m: values[:, :, i].mean(axis=1).tolist() for i, m in enumerate(plan.methods)
            },
        }
    return found


def _by_method(plan: Plan, values: np.ndarray, reference: str) -> dict[str, Any]:
    """Levels and paired differences of the methods from values [S, n, M]."""
    others = [i for i, method in enumerate(plan.methods) if method != reference]
    paired = values[:, :, others] - values[:, :, [plan.methods.index(reference)]]
    names = [plan.methods[i] for i in others]
    found = {
        "after": {m: e.to_json() for m, e in zip(plan.methods, estimates(values), strict=True)},
        "difference": {},
        "smallest_difference": None,
    }
    if others:
        told = zip(names, estimates(paired), strict=True)
        found["difference"] = {name: estimate.to_json() for name, estimate in told}
        found["smallest_difference"] = smallest_difference(paired)
    return found


def _right(folder: Path, step: int) -> dict[str, int]:
    """{problem: right samples} of an evaluation, by name of the problem."""
    lines = read_lines(folder / "evaluations" / f"student_{step:06d}.responses.jsonl")
    right = dict.fromkeys(sorted(line["problem_id"] for line in lines), 0)
    for line in lines:
        right[line["problem_id"]] += line["verdict"] == Verdict.CORRECT.value
    return right


def _probe_group(
    plan: Plan,
    probe: Probe,
    measured: dict[tuple[str, int], Figures],
    group: str,
    reference: str,
) -> dict[str, Any]:
    """Each figure before and after: averaged in each prompt first, then prompts weigh equally."""
    inside = probe.corrected if group == "corrected" else ~probe.corrected
    prompts = probe.prompt[inside].tolist()

    def of_prompts(figures: Figures, name: str) -> np.ndarray:
        return 100 * bootstrap.cluster_means(prompts, figures[name][inside])[1]

    found = {}
    for name in PROBE_FIGURES:
        values = np.array(
            [[of_prompts(measured[m, s], name) for m in plan.methods] for s in plan.seeds]
        ).swapaxes(1, 2)
        before = of_prompts(probe.initial, name)[None, :, None]
        found[name] = {
            "before": estimates(before)[0].to_json(),
            **_by_method(plan, values, reference),
        }
    return found


def _phases(plan: Plan, config: dict[str, Any], method: str) -> list[dict[str, Any]]:
    """Corrections per token beside mean TV(p, q) and its bound, for parts of the run.

    The parts are those of the schedule, the same for every method. Means are over all response
    tokens of a part and all seeds; None where the method has no such figure.
    """
    lines = [x for s in plan.seeds for x in read_lines(plan.folder(method, s) / "metrics.jsonl")]
    found = []
    for steps in phases_of(config):
        chosen = [line for line in lines if line["step"] in steps]
        found.append(
            {
                "steps": [steps[0], steps[-1]],
                "tokens": sum(line["response_tokens"] for line in chosen),
                "corrections": _percent(chosen, "correction_rate"),
                "tv": _percent(chosen, "tv_mean"),
                "bound": _percent(chosen, "pinsker_bound"),
                "teacher_mode": _percent(chosen, "teacher_mode_rate"),
            }
        )
    return found


def phases_of(config: dict[str, Any]) -> list[range]:
    """The guided steps in `GUIDED_PHASES` parts, and those at epsilon 0."""
    schedule = {
        name.removeprefix("epsilon."): value
        for name, value in config.items()
        if name.startswith("epsilon.")
    }
    steps = range(1, config["steps"] + 1)
    guided = [step for step in steps if epsilon_at(schedule, step) > 0]
    alone = [step for step in steps if step not in set(guided)]
    parts = [*np.array_split(guided, min(GUIDED_PHASES, max(len(guided), 1))), alone]
    return [range(int(part[0]), int(part[-1]) + 1) for part in parts if len(part)]


def _percent(lines: list[dict[str, Any]], name: str) -> float | None:
    """The mean of a rate over the response tokens of these steps."""
    if any(line.get(name) is None for line in lines):
        return None
    weights = [line["response_tokens"] for line in lines]
    return 100 * float(np.average([line[name] for line in lines], weights=weights))


def _summary(plan: Plan, method: str, seed: int) -> dict[str, Any]:
    return json.loads((plan.folder(method, seed) / "summary.json").read_text("utf-8"))
