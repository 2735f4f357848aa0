"""`Prompts` in, `Rollout` out: the only seam between generation and training.

The annotations tell the shapes of the arrays. They are not enforced (`no_type_check`), because the
same trees carry shardings, shapes and NumPy arrays when JAX maps over them.
"""

from typing import no_type_check

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int


@no_type_check
@struct.dataclass
class Prompts:
    """Rows to be answered; a prompt with M samples stands in M rows.

    Attributes:
      tokens: right-padded prompt ids; what stands behind ``length`` is never read.
      length: valid prompt tokens of the row, at least 1.
      sequence_id: names the row's randomness (keys.py). Rows with equal ids draw alike, so ids
        are distinct within a step; they do not depend on where in the batch the row stands.
    """

    tokens: Int[Array, "B P"]
    length: Int[Array, "B"]
    sequence_id: Int[Array, "B"]


@no_type_check
@struct.dataclass
class Counters:
    """What a rollout cost. Scalars; forwards count calls of a model, whatever their batch."""

    waves: Int[Array, ""]  # draft-verify rounds (for student-only generation: decode steps)
    row_waves: Int[Array, ""]  # the same, summed over the rows alive in each
    student_forwards: Int[Array, ""]  # without prefills
    teacher_forwards: Int[Array, ""]  # without prefills; exactly 0 for student-only generation
    committed: Int[Array, ""]  # response tokens kept
    prefilled: Int[Array, ""]  # prompts of more than one token that were run through the models


@no_type_check
@struct.dataclass
class Rollout:
    """A finished batch of responses, aligned by response position (paper 3.3; METHODS section 4).

    Position t of row b describes the committed token y = ``tokens[b, t]`` and the coupling event
    that produced it. Positions at or behind ``length`` are padding: tokens hold the pad id, flags
    are False, numbers 0. Masks come from ``length``, never from ids (pad may be an end id).

    For student-only rollouts the teacher's columns (``log_t``, ``teacher_mode``) are filled by
    ``rollout.score``; ``beta``, ``tv``, ``kl``, ``residual_mass`` are 0, ``log_q`` equals
    ``log_p``, ``accept_prob`` is 1 and nothing is corrected.
    """

    prompts: Prompts
    tokens: Int[Array, "B T"]  # y, the committed token
    length: Int[Array, "B"]  # valid response tokens, the end token included
    finished: Bool[Array, "B"]  # ended by an end token; otherwise cut by the length cap
    nonfinite: Bool[Array, "B"]  # a model emitted NaN or only -inf for this row; do not train on it
    proposal: Int[Array, "B T"]  # z, the student's draft at this position
    corrected: Bool[Array, "B T"]  # C = 1: z was rejected, y drawn from [q - p]+
    log_p: Float[Array, "B T"]  # log p(y), student that drew the proposal
    log_t: Float[Array, "B T"]  # log T(y)
    log_q: Float[Array, "B T"]  # log q(y)
    accept_prob: Float[Array, "B T"]  # min(1, q(z) / p(z))
    beta: Float[Array, "B T"]
    kl: Float[Array, "B T"]  # KL(q || p), nats
    tv: Float[Array, "B T"]  # TV(p, q) = the residual's mass before normalisation
    entropy: Float[Array, "B T"]  # H(p), nats
    teacher_mode: Int[Array, "B T"]  # argmax T, the lowest id among equals
    teacher_sample: Int[Array, "B T"]  # a draw from T where corrected and asked for, else pad
    epsilon: Float[Array, ""]
    counters: Counters

    @property
    def valid(self) -> Bool[Array, "B T"]:
        """Positions that hold a response token."""
        return jnp.arange(self.tokens.shape[1])[None, :] < self.length[:, None]

    @property
    def truncated(self) -> Bool[Array, "B"]:
        """Rows cut by the length cap."""
        return ~self.finished


def num_valid(rollout: Rollout) -> jax.Array:
    """N_valid, the number of response tokens of the whole batch, as float32."""
    return rollout.length.sum().astype(jnp.float32)
