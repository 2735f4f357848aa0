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
from saki_jax.rollout.keys import Purpose, position_keys, uniform


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


def at_corrections_sampled(rollout: Rollout, key: jax.Array) -> Routed:
    """SAKI's positions, with a draw from the teacher in place of its mode (teacher_sampled)."""
    del key
    return _routed(rollout, rollout.corrected, rollout.teacher_sample)


def at_random(rollout: Rollout, key: jax.Array) -> Routed:
    """random_tm: in each row as many as SAKI's corrections, uniform without replacement among the
    valid positions. It spends SAKI's budget without its placement.
    """
    noise = _placement_noise(rollout, key)
    chosen = _smallest(noise, noise, rollout)
    return _routed(rollout, chosen, rollout.teacher_mode)


def at_high_tv(rollout: Rollout, key: jax.Array) -> Routed:
    """tv_weighted_tm: as `at_random`, but with weight TV(p_t, q_t), by an exponential race.

    The m smallest of -log(U) / TV win, which is successive sampling without replacement. A row
    with fewer than m positive weights is filled up uniformly.
    """
    noise = _placement_noise(rollout, key)
    # In logarithms, where no quotient overflows; weight 0 comes last, in the order of the noise.
    arrival = jnp.where(rollout.tv > 0, jnp.log(-jnp.log(noise)) - jnp.log(rollout.tv), jnp.inf)
    chosen = _smallest(arrival, noise, rollout)
    return _routed(rollout, chosen, rollout.teacher_mode)


def _placement_noise(rollout: Rollout, key: jax.Array) -> jax.Array:
    """Uniform numbers [B, T], one a position, under a purpose that no rollout draws with."""
    shape = rollout.tokens.shape
    row = jnp.broadcast_to(rollout.prompts.sequence_id[:, None], shape)
    position = jnp.broadcast_to(jnp.arange(shape[1])[None, :], shape)
    return uniform(position_keys(key, row, position, Purpose.PLACEMENT))


def _smallest(values: jax.Array, ties: jax.Array, rollout: Rollout) -> jax.Array:
    """In each row the m smallest valid positions [B, T], m the number of its corrections; equal
    values in the order of `ties`.
    """
    valid = trained(rollout)
    wanted = (rollout.corrected & valid).sum(axis=1, keepdims=True)
    # By three keys, the last one first: padding behind everything, then values, then ties.
    order = jnp.lexsort((ties, values, ~valid), axis=-1)
    rank = jnp.argsort(order, axis=-1)
    return valid & (rank < wanted)


def nowhere(rollout: Rollout, key: jax.Array) -> Routed:
    """TRB and OPD: no position gets a teacher token."""
    del key
    return _routed(rollout, jnp.zeros_like(rollout.corrected), rollout.tokens)
