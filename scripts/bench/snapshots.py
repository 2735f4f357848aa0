"""What stands in the slots at some moments of a rollout, so that phases meet what a wave meets."""

import jax.numpy as jnp
import numpy as np

from saki_jax.rollout.slots import Slots


def snapshots(
    lengths: np.ndarray, prompt_lengths: np.ndarray, num_slots: int, refill: int, number: int
) -> list[Slots]:
    """The slots at evenly spaced steps of answering rows of these lengths in the order given.

    A decode step costs what the longest live row and the number of slots make it cost, so the mean
    over these moments is that of the run: early ones have many short rows, late ones a few long.

    Args:
      lengths, prompt_lengths: of each row, [B].
      num_slots: W.
      refill: free slots at which waiting rows are admitted.
      number: of moments.
    """
    row, count = np.full(num_slots, -1), np.zeros(num_slots, int)
    waiting, history = 0, []
    while True:
        free = np.flatnonzero(row < 0)
        if waiting < len(lengths) and (len(free) >= refill or len(free) == num_slots):
            admitted = free[: len(lengths) - waiting]
            row[admitted] = waiting + np.arange(len(admitted))
            count[admitted] = 0
            waiting += len(admitted)
        if (row < 0).all():
            break
        history.append((row.copy(), count.copy()))
        count = count + 1
        row = np.where((row >= 0) & (count < lengths[row]), row, -1)
    chosen = (np.arange(number) + 0.5) / number * len(history)
    return [at_work(*history[int(step)], prompt_lengths) for step in chosen]


def at_work(row: np.ndarray, count: np.ndarray, prompt_lengths: np.ndarray) -> Slots:
    """Slots that hold these rows (-1: none) after so many response tokens."""
    alive = jnp.asarray(row >= 0)
    served = jnp.maximum(jnp.asarray(row, jnp.int32), 0)
    count = jnp.asarray(count, jnp.int32)
    return Slots(
        row=served,
        sequence_id=served,
        length=jnp.asarray(prompt_lengths, jnp.int32)[served] - 1 + count,
        pending=jnp.ones_like(count),
        count=count,
        alive=alive,
        finished=~alive,
        nonfinite=jnp.zeros_like(alive),
    )
