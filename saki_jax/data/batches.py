"""Prompt batches as a pure function of (seed, step).

Usage, the same on every host::

    batches = PromptBatches(encoded, prompts_per_step=64, seed=seed, epoch_end="wrap")
    batch = batches.at(step)                # step counts from 1; or next(batches) and its state
    rows = sample_rows(batch, 8)            # NumPy arrays of 512 rows, prompt-major
    prompts = Prompts(*map(jnp.asarray, rows))

Every host computes the whole batch (ids of a step are a few hundred kilobytes) and hands its
devices their part, so the number of hosts cannot change what a step sees, and no host can run out
of batches before another.
"""

import hashlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import grain
import numpy as np

from saki_jax.data.prompts import DataError, Problem
from saki_jax.data.template import EncodedPrompts

log = logging.getLogger(__name__)

EPOCH_ENDS = ("wrap", "drop")


@dataclass(frozen=True)
class PromptBatch:
    """The prompts of one step.

    Attributes:
      problems: N problems.
      tokens: [N, P] int32, right-padded; P is the same at every step.
      length: [N] int32.
      index: [N] row numbers in the encoded data.
    """

    problems: tuple[Problem, ...]
    tokens: np.ndarray
    length: np.ndarray
    index: np.ndarray


class SampleRows(NamedTuple):
    """The fields of `rollout.batch.Prompts`, in its order, as NumPy arrays of B = N * M rows."""

    tokens: np.ndarray
    length: np.ndarray
    sequence_id: np.ndarray


class PromptBatches(Iterator[PromptBatch]):
    """Shuffled batches of N prompts; each epoch has its own order, no row comes twice in it.

    Args:
      encoded: the prompts.
      prompts_per_step: N; every batch has exactly so many.
      seed: fixes the order.
      epoch_end: what happens to the rows left over when N does not divide their number: "wrap"
        begins the next epoch inside the same batch, "drop" leaves them out of this epoch.

    Raises:
      DataError: when there are fewer prompts than N.
    """

    def __init__(
        self, encoded: EncodedPrompts, *, prompts_per_step: int, seed: int, epoch_end: str = "wrap"
    ) -> None:
        if epoch_end not in EPOCH_ENDS:
            raise ValueError(f"epoch_end is {epoch_end!r}; expected one of {EPOCH_ENDS}")
        rows = len(encoded)
        if rows < prompts_per_step:
            raise DataError(
                f"{rows} prompts cannot fill a batch of {prompts_per_step}: "
                "bring more problems or lower data.prompts_per_step"
            )
        self._encoded = encoded
        self._next_step = 1
        self._identity = {
            "seed": int(seed),
            "prompts_per_step": int(prompts_per_step),
            "epoch_end": epoch_end,
            "prompts": hashlib.sha256(encoded.fingerprint().encode()).hexdigest()[:16],
        }
        order = grain.MapDataset.range(rows).seed(seed).shuffle()
        if epoch_end == "wrap":
            order = order.repeat().batch(prompts_per_step, drop_remainder=True)
        else:
            order = order.batch(prompts_per_step, drop_remainder=True).repeat()
        self._order = order
        full, left = divmod(rows, prompts_per_step)
        what = "wrap into the next epoch" if epoch_end == "wrap" else "are dropped"
        log.info(
            "%d prompts, %d a step: %d full batches an epoch, %d left over %s",
            rows,
            prompts_per_step,
            full,
            left,
            what,
        )

    def at(self, step: int) -> PromptBatch:
        """The batch of a step (from 1), whatever was asked for before."""
        if step < 1:
            raise ValueError(f"steps count from 1, got {step}")
        index = np.asarray(self._order[step - 1])
        return PromptBatch(
            tuple(self._encoded.problems[i] for i in index),
            self._encoded.tokens[index],
            self._encoded.length[index],
            index,
        )

    def __next__(self) -> PromptBatch:
        batch = self.at(self._next_step)
        self._next_step += 1
        return batch

    def get_state(self) -> dict:
        """The position as a JSON object: the next step, and what the order depends on."""
        return {"next_step": self._next_step, **self._identity}

    def set_state(self, state: dict) -> None:
        """Goes to a position from `get_state`.

        Raises:
          DataError: when the state belongs to other prompts, another seed or another batch size.
        """
        differ = [name for name, value in self._identity.items() if state.get(name) != value]
        if differ:
            told = ", ".join(
                f"{n}: {state.get(n)!r} then, {self._identity[n]!r} now" for n in differ
            )
            raise DataError(f"the saved data position belongs to another order of prompts ({told})")
        self._next_step = int(state["next_step"])


def sample_rows(batch: PromptBatch, samples: int) -> SampleRows:
    """Each prompt M times, prompt-major: row n * M + m is sample m of prompt n.

    The row number is also the sequence id, so randomness is named by prompt place and sample.
    """
    rows = len(batch.length) * samples
    return SampleRows(
        np.repeat(batch.tokens, samples, axis=0),
        np.repeat(batch.length, samples),
        np.arange(rows, dtype=np.int32),
    )
