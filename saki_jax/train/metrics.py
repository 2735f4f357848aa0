"""What a step reports: figures of the rollout, beside those of the update, one line a step."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tensorboardX import SummaryWriter

from saki_jax.rollout.batch import Rollout
from saki_jax.train.baselines import INTERLEAVED, REWARDS, Method
from saki_jax.train.objective import masked_mean
from saki_jax.train.rundir import as_json
from saki_jax.train.state import TrainState
from saki_jax.train.update import Stats

# What only a bridge between student and teacher has.
BRIDGE_FIGURES = (
    *("epsilon", "pinsker_bound", "tv_mean", "kl_mean", "kl_over_epsilon"),
    *("beta_mean", "accept_prob_mean"),
)


def not_measured(method: Method) -> tuple[str, ...]:
    """The figures of `step_record` that mean nothing for a method; they are reported as null."""
    names = BRIDGE_FIGURES if method.rollout == INTERLEAVED else ()
    return (*names, "log_ratio_mean") if method.needs == REWARDS else names


@jax.jit
def rollout_stats(rollout: Rollout, known_ids: jax.Array | int) -> Stats:
    """Scalars that describe a rollout; means are over its valid response tokens.

    Rows with `nonfinite` set are left out of the means and counted. `known_ids` is the tokenizer's
    size: ids from there on have no token.
    """
    mask = rollout.valid & ~rollout.nonfinite[:, None]
    counters = rollout.counters
    length = rollout.length.astype(jnp.float32)
    return {
        "epsilon": rollout.epsilon,
        "correction_rate": masked_mean(rollout.corrected, mask),
        "corrections": (rollout.corrected & mask).sum(),
        "tv_mean": masked_mean(rollout.tv, mask),
        "kl_mean": masked_mean(rollout.kl, mask),
        "beta_mean": masked_mean(rollout.beta, mask),
        "accept_prob_mean": masked_mean(rollout.accept_prob, mask),
        "entropy": masked_mean(rollout.entropy, mask),
        "log_ratio_mean": masked_mean(rollout.log_p - rollout.log_t, mask),
        "response_length": length.mean(),
        "response_length_max": length.max(),
        "truncation_rate": rollout.truncated.mean(dtype=jnp.float32),
        "nonfinite_rows": rollout.nonfinite.sum(),
        "unknown_ids": ((rollout.tokens >= known_ids) & mask).sum(),
        "response_tokens": rollout.length.sum(),
        "waves": counters.waves,
        "row_waves": counters.row_waves,
        "student_forwards": counters.student_forwards,
        "teacher_forwards": counters.teacher_forwards,
    }


def step_record(
    step: int,
    rollout: Rollout,
    stats: Stats,
    state: TrainState,
    seconds: dict[str, float],
    known_ids: int,
) -> dict[str, Any]:
    """The line of metrics.jsonl for one step, as plain numbers.

    Args:
      step: counted from 1.
      rollout: of this step.
      stats: what the update returned.
      state: after the update.
      seconds: wall time by part; `rollout` is one of them.
      known_ids: the tokenizer's size.

    The correction rate stands beside mean TV, which it equals in expectation, and beside the
    Pinsker bound sqrt(epsilon / 2), which no TV exceeds. `kl_over_epsilon` is None where epsilon
    is 0.
    """
    counters = {
        "skipped_steps": state.skipped_steps,
        "skipped_in_row": state.skipped_in_row,
        "empty_batches": state.empty_batches,
    }
    fetched = jax.device_get((rollout_stats(rollout, known_ids), stats, counters))
    figures = {name: _plain(value) for part in fetched for name, value in part.items()}
    epsilon, tokens = figures["epsilon"], figures["response_tokens"]
    total = sum(seconds.values())
    return {
        "step": step,
        **figures,
        "pinsker_bound": math.sqrt(epsilon / 2),
        "kl_over_epsilon": figures["kl_mean"] / epsilon if epsilon > 0 else None,
        "committed_per_wave": tokens / max(figures["row_waves"], 1),
        "tokens_per_second": tokens / max(seconds["rollout"], 1e-9),
        "tokens_per_second_step": tokens / max(total, 1e-9),
        **{f"seconds_{part}": value for part, value in seconds.items()},
        "seconds_step": total,
    }


def _plain(value: Any) -> int | float:
    value = np.asarray(value)
    return int(value) if np.issubdtype(value.dtype, np.integer) else float(value)


class MetricsWriter:
    """Appends to metrics.jsonl and to TensorBoard; on processes other than the first, nothing.

    Args:
      path: of metrics.jsonl.
      tensorboard: folder of the event files.
      done: steps written before; TensorBoard forgets what it has behind them.
    """

    def __init__(self, path: Path, tensorboard: Path, done: int = 0):
        self._file = self._events = None
        if jax.process_index() == 0:
            self._file = path.open("a", encoding="utf-8")
            self._events = SummaryWriter(str(tensorboard), purge_step=done + 1 if done else None)

    def write(self, record: dict[str, Any]) -> None:
        """One line; NaN and infinities become null."""
        if self._file is None:
            return
        self._file.write(json.dumps(as_json(record), allow_nan=False) + "\n")
        self._file.flush()
        for name, value in record.items():
            if name != "step" and isinstance(value, int | float):
                self._events.add_scalar(name, value, record["step"])

    def close(self) -> None:
        """Flushes and closes both."""
        if self._file is not None:
            self._file.close()
            self._events.close()


def correction_rates(records: list[dict[str, Any]]) -> dict[str, float | None]:
    """Corrections per response token while epsilon > 0 and at epsilon = 0, over all steps.

    Steps of a method without a bridge have no epsilon and belong to neither.
    """
    records = [record for record in records if record["epsilon"] is not None]

    def rate(of_phase: Callable[[float], bool]) -> float | None:
        phase = [record for record in records if of_phase(record["epsilon"])]
        tokens = sum(record["response_tokens"] for record in phase)
        return sum(record["corrections"] for record in phase) / tokens if tokens else None

    return {"epsilon_above_0": rate(lambda e: e > 0), "epsilon_0": rate(lambda e: e == 0)}
