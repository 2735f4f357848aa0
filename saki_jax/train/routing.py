"""Which supervision each position gets: pure functions of (rollout, key) (METHODS section 4).

`key` is the key of the step. A route that draws folds in its own purpose, so that all routes see
the same rollout for the same seed.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int

from saki_jax.rollout.batch import Rollout


@struct.dataclass
class Routed:
    """The supervision of a rollout batch, aligned like the rollout.

    Attributes:
      valid: positions that are trained at all: response tokens, without the rows for which a
        model emitted nothing finite.
      distilled: the valid positions trained by -log pi(target); all other valid ones get the
        surrogate. The two never overlap, so no token is counted twice.
      target: the teacher's token at distilled positions, the committed token elsewhere (so that
        every entry is an id of the vocabulary).
    """

    valid: Bool[Array, "*A B T"]
    distilled: Bool[Array, "*A B T"]
    target: Int[Array, "*A B T"]


Route = Callable[[Rollout, jax.Array], Routed]


def trained(rollout: Rollout) -> Bool[Array, "B T"]:
    """Response positions of the rows that stayed finite; N_valid is their number."""
    return rollout.valid & ~rollout.nonfinite[:, None]


def _routed(rollout: Rollout, distilled: jax.Array, teacher_token: jax.Array) -> Routed:
    valid = trained(rollout)
    distilled = distilled & valid
    return Routed(
        valid=valid,
        distilled=distilled,
        target=jnp.where(distilled, teacher_token, jnp.where(valid, rollout.tokens, 0)),
    )


def at_corrections(rollout: Rollout, key: jax.Array) -> Routed:
    """SAKI: the teacher's mode exactly where the coupling corrected the student (3.4)."""
    del key
    return _routed(rollout, rollout.corrected, rollout.teacher_mode)


def nowhere(rollout: Rollout, key: jax.Array) -> Routed:
    """TRB and OPD: no position gets a teacher token."""
    del key
    return _routed(rollout, jnp.zeros_like(rollout.corrected), rollout.tokens)
