"""What the training step is measured on: the same tokens in rows of different length."""

from dataclasses import dataclass, fields

import jax.numpy as jnp
import numpy as np

from saki_jax.models.config import Qwen3Config
from saki_jax.rollout.batch import Counters, Prompts, Rollout

EVEN, UNEVEN, EXTREME = "even", "heavy-tailed", "extreme"
COLUMNS, EMPTY = "all columns", "empty"
CORRECTED = 0.03  # share of the tokens that get the teacher's mode
EPSILON = 3 * CORRECTED**2  # of the generated rollout: corrects about as much (Pinsker)


@dataclass(frozen=True)
class UpdateScenario:
    """A preset.

    Attributes:
      name: of the preset.
      student, teacher: shapes; random weights.
      rows: responses, B.
      prompt_length: of every row, P.
      response_length: T.
      mean_length: of the responses; B times it is the number of tokens of every split.
      budget: tokens a micro-batch.
      chunk: positions whose logits exist together.
      remat: recompute layers in the backward pass.
      slots: rows generated at the same time.
      repeats: timed rounds.
    """

    name: str
    student: Qwen3Config
    teacher: Qwen3Config
    rows: int
    prompt_length: int
    response_length: int
    mean_length: int
    budget: int
    chunk: int = 512
    remat: bool = False
    slots: int = 0
    repeats: int = 3

    def splits(self) -> dict[str, np.ndarray]:
        """Response lengths [B]. Three have the same sum; `all columns` fills every column, which
        is what a pass over unpacked rows costs, and `empty` makes no pass at all.
        """
        tokens = self.rows * self.mean_length
        spread = np.exp(1.2 * np.random.default_rng(0).normal(size=self.rows))
        longest, rest = divmod(tokens - self.rows, self.response_length - 1)
        row = np.arange(self.rows)
        extreme = np.where(
            row < longest, self.response_length, np.where(row == longest, 1 + rest, 1)
        )
        return {
            EVEN: np.full(self.rows, self.mean_length),
            UNEVEN: _with_sum(spread * self.mean_length, tokens, self.response_length),
            EXTREME: extreme,
            COLUMNS: np.full(self.rows, self.response_length),
            EMPTY: np.zeros(self.rows, int),
        }

    def rollout(self, lengths: np.ndarray) -> Rollout:
        """A finished rollout of these lengths on random tokens."""
        rng = np.random.default_rng(1)
        shape = (self.rows, self.response_length)
        ids = lambda size: jnp.asarray(  # noqa: E731
            rng.integers(1, self.student.vocab_size, size), jnp.int32
        )
        near = lambda: jnp.asarray(  # noqa: E731
            -np.log(self.student.vocab_size) + 0.1 * rng.normal(size=shape), jnp.float32
        )
        nothing = jnp.zeros(shape, jnp.float32)
        rows = jnp.arange(self.rows, dtype=jnp.int32)
        prompts = ids((self.rows, self.prompt_length)).at[:, 0].set(rows)  # for `impose_lengths`
        return Rollout(
            prompts=Prompts(
                tokens=prompts,
                length=jnp.full_like(rows, self.prompt_length),
                sequence_id=rows,
            ),
            tokens=ids(shape),
            length=jnp.asarray(lengths, jnp.int32),
            finished=jnp.ones(self.rows, bool),
            nonfinite=jnp.zeros(self.rows, bool),
            proposal=ids(shape),
            corrected=jnp.asarray(rng.random(shape) < CORRECTED),
            log_p=near(),
            log_t=near(),
            log_q=near(),
            **dict.fromkeys(("accept_prob", "beta", "kl", "tv", "entropy"), nothing),
            teacher_mode=ids(shape),
            teacher_sample=ids(shape),
            epsilon=jnp.float32(0.0),
            counters=Counters(*[jnp.int32(0)] * len(fields(Counters))),
        )


def _with_sum(lengths: np.ndarray, total: int, most: int) -> np.ndarray:
    """Whole numbers from 1 to `most`, in proportion to `lengths`, that add up to `total`."""
    low, high = 0.0, total / lengths.min()
    for _ in range(100):
        scale = (low + high) / 2
        rounded = np.clip(np.round(scale * lengths), 1, most).astype(int)
        low, high = (scale, high) if rounded.sum() <= total else (low, scale)
    rounded = np.clip(np.round(low * lengths), 1, most).astype(int)
    for row in np.argsort(lengths):  # what rounding left over goes to the shortest
        rounded[row] += min(total - rounded.sum(), most - rounded[row])
    return rounded
