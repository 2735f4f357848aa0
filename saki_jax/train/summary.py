"""summary.json: what a finished run found."""

from typing import Any

from ml_collections import ConfigDict

from saki_jax.train import evaluations
from saki_jax.train.metrics import correction_rates
from saki_jax.train.rundir import RunDir


def summarise(config: ConfigDict, folder: RunDir) -> dict[str, Any]:
    """The figures of one run, from its files.

    `teacher`, `student_before` and `student_after` hold mean_at_k and pass_at_k in [0, 1] (k is
    `samples`), or are None where no evaluation was asked for. `correction_rate` is per response
    token, for the steps with epsilon > 0 and for those at epsilon 0.
    """
    k = config.eval.samples
    keys = (f"mean_at_{k}", f"pass_at_{k}", "problems")

    def scores(step: int | None) -> dict[str, Any] | None:
        found = evaluations.read(folder.evaluations, step)
        return {key: found[key] for key in keys} if found else None

    records = folder.read_metrics()
    return {
        "method": config.method,
        "seed": config.seed,
        "steps": config.steps,
        "samples": k,
        "teacher": scores(None),
        "student_before": scores(0),
        "student_after": scores(config.steps),
        "correction_rate": correction_rates(records),
        "skipped_steps": records[-1]["skipped_steps"],
        "empty_batches": records[-1]["empty_batches"],
        "response_tokens": sum(record["response_tokens"] for record in records),
        "seconds": sum(record["seconds_step"] for record in records),
        "note": config.note,
    }
