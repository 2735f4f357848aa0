"""GRPO, which makes the teacher (Table 4): rewards of responses, advantages within a prompt.

    A = (r - mean) / (std + 1e-6)         mean and std (n - 1) over the M samples of a prompt

One value for all tokens of a response; no KL term, no entropy term.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from saki_jax.data.prompts import Problem
from saki_jax.evals.evaluate import GradeAll
from saki_jax.evals.grade import Verdict
from saki_jax.models.tokenizer import Tokenizer
from saki_jax.rollout.batch import Rollout

SMALL = 1e-6  # beside the standard deviation


def group_advantages(rewards: Float[Array, "B"], samples: int) -> Float[Array, "B"]:
    """The advantage of each row among the `samples` rows of its prompt (rows prompt-major).

    A group of equal rewards has advantage exactly 0.

    Raises:
      ValueError: fewer than two samples, which have no standard deviation.

    >>> group_advantages(jnp.array([1.0, 0.0, 0.0, 1.0, 1.0, 1.0]), 3).round(3).tolist()
    [1.155, -0.577, -0.577, 0.0, 0.0, 0.0]
    """
    if samples < 2:
        raise ValueError(
            f"{samples} sample a prompt; an advantage within the group needs at least 2"
        )
    groups = rewards.reshape(-1, samples)
    # A rounded mean would leave equal rewards some 1e-8 off it, and the quotient 0.01.
    equal = (groups == groups[:, :1]).all(axis=1, keepdims=True)
    centred = groups - groups.mean(axis=1, keepdims=True)
    spread = groups.std(axis=1, keepdims=True, ddof=1)
    return jnp.where(equal, 0.0, centred / (spread + SMALL)).reshape(-1)


def rewards(
    rollout: Rollout, problems: Sequence[Problem], tokenizer: Tokenizer, grade_all: GradeAll
) -> tuple[np.ndarray, dict[str, Any]]:
    """(reward 0 or 1 of each row [B], figures of the step).

    A response is judged by its text as in an evaluation: it earns 1 if the last box holds the
    answer. One that the length cap cut before its box earns 0, and so does one over which the
    grader gave up.

    Args:
      rollout: rows prompt-major, equally many a problem.
      problems: of the step.
      tokenizer: decodes responses.
      grade_all: judges (gold, response) pairs.
    """
    tokens, length = jax.device_get((rollout.tokens, rollout.length))
    samples = len(length) // len(problems)
    texts = [tokenizer.decode(row[:n].tolist()) for row, n in zip(tokens, length, strict=True)]
    golds = [problem.answer for problem in problems for _ in range(samples)]
    verdicts = grade_all(list(zip(golds, texts, strict=True)))
    earned = np.array([verdict is Verdict.CORRECT for verdict in verdicts], np.float32)
    groups = earned.reshape(-1, samples)
    return earned, {
        "reward_mean": float(earned.mean()),
        "reward_equal_groups": float((groups == groups[:, :1]).all(axis=1).mean()),
        "reward_timeouts": sum(verdict is Verdict.TIMEOUT for verdict in verdicts),
    }
