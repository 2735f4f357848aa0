"""From graded responses to the figures of an evaluation, with their intervals."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from saki_jax.evals import bootstrap
from saki_jax.evals.grade import Verdict
from saki_jax.evals.graded import Scores

MEAN, PASS = "mean", "pass"


def set_result(scores: Scores, *, title: str, whole: bool, resamples: int, name: str) -> dict:
    """What is kept of one set, as a JSON object.

    Args:
      scores: of all its responses.
      title: the set's name in tables.
      whole: all problems were evaluated, not the first few.
      resamples: of the bootstrap.
      name: of the set; seeds the bootstrap.
    """
    right: dict[str, int] = {}
    for response in scores.responses:
        hit = response.verdict is Verdict.CORRECT
        right[response.problem_id] = right.get(response.problem_id, 0) + hit
    result = {
        "title": title,
        "whole": whole,
        "problems": scores.problems,
        "samples": scores.samples,
        "verdicts": scores.verdicts,
        "truncated": scores.truncated,
        "mean_length": scores.mean_length,
        "unknown_ids": scores.unknown_ids,
        "nonfinite": scores.nonfinite,
        "right": right,
    }
    for figure in (MEAN, PASS):
        values = np.array(list(by_problem(result, figure).values()))
        seed = bootstrap.set_seed(0, name)
        result[figure] = bootstrap.mean_interval(values, resamples=resamples, seed=seed).to_json()
    return result


def by_problem(result: Mapping[str, Any], figure: str) -> dict[str, float]:
    """{problem id: value}: share of right samples ("mean"), or 1 where one is right ("pass")."""
    samples = result["samples"]
    if figure == MEAN:
        return {name: c / samples for name, c in result["right"].items()}
    return {name: float(c > 0) for name, c in result["right"].items()}


def average(sets: Mapping[str, Mapping[str, Any]], *, resamples: int) -> dict:
    """The unweighted mean over sets of both figures, with intervals."""
    values = {
        figure: {
            name: np.array(list(by_problem(result, figure).values()))
            for name, result in sets.items()
        }
        for figure in (MEAN, PASS)
    }
    return {
        figure: bootstrap.macro_interval(per_set, resamples=resamples).to_json()
        for figure, per_set in values.items()
    }
