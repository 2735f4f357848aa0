"""The rows that wait for a slot: in which order they are admitted, and who shares a prompt."""

from typing import no_type_check

import numpy as np
from flax import struct
from jaxtyping import Array, Int

from saki_jax.rollout.batch import Prompts


@no_type_check
@struct.dataclass
class Queue:
    """B rows in the order of their admission, and the U <= B different prompts among them.

    The order is free: randomness goes by sequence id, so it changes no token. Rows of one prompt
    follow each other, longest prompt first: prompts prefilled together then have similar lengths.
    """

    row: Int[Array, "B"]  # the i-th to be admitted: its row in the batch
    prompt: Int[Array, "B"]  # and its prompt, 0 .. U - 1, never less than that of the row before
    source: Int[Array, "B"]  # the u-th prompt: a row that holds it; entries from U on mean nothing
    num_rows: Int[Array, ""]  # entries of `row` and `prompt` from here on mean nothing
    num_prompts: Int[Array, ""]  # U


def make_queue(prompts: Prompts, size: int) -> Queue:
    """The queue of a batch as NumPy arrays, padded to ``size`` entries. Rows share a prompt when
    their valid tokens are equal, whatever stands behind them and wherever they stand."""
    tokens, length = np.asarray(prompts.tokens), np.asarray(prompts.length)
    inside = np.arange(tokens.shape[1])[None, :] < length[:, None]
    name = np.concatenate([-length[:, None], np.where(inside, tokens, 0)], axis=1)
    _, source, prompt = np.unique(name, axis=0, return_index=True, return_inverse=True)
    prompt = prompt.reshape(-1)
    row = np.argsort(prompt, kind="stable")

    def padded(x: np.ndarray) -> np.ndarray:
        return np.pad(x, (0, size - len(x))).astype(np.int32)

    return Queue(
        row=padded(row),
        prompt=padded(prompt[row]),
        source=padded(source),
        num_rows=np.int32(len(row)),
        num_prompts=np.int32(len(source)),
    )


def check_prompts(prompts: Prompts, vocab_size: int) -> int:
    """The number of rows B.

    Raises:
      ValueError: no rows, a length outside 1..P, a token that the model does not have, or two rows
        of one sequence id.
    """
    rows, width = prompts.tokens.shape
    if rows == 0:
        raise ValueError("a rollout needs at least one prompt, got 0 rows")
    length, ids = np.asarray(prompts.length), np.asarray(prompts.sequence_id)
    wrong = np.flatnonzero((length < 1) | (length > width))
    if wrong.size:
        row = int(wrong[0])
        raise ValueError(
            f"prompt row {row} has length {int(length[row])}; lengths must lie in 1..{width}, the "
            "width of the prompts. An empty prompt has no token to start from"
        )
    tokens = np.asarray(prompts.tokens)
    inside = np.arange(width)[None, :] < length[:, None]
    unknown = inside & ((tokens < 0) | (tokens >= vocab_size))
    if unknown.any():
        row, column = np.argwhere(unknown)[0].tolist()
        raise ValueError(
            f"prompt row {row} holds the id {int(tokens[row, column])} at {column}; the model has "
            f"the ids 0..{vocab_size - 1}. Do prompts and model belong to one tokenizer?"
        )
    if np.unique(ids).size != rows:
        raise ValueError(
            f"{rows} rows have only {np.unique(ids).size} distinct sequence ids; rows with equal "
            "ids would draw the same random numbers. Give each row of a step an id of its own"
        )
    return rows
