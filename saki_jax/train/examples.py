"""A rollout as the trainer's rows: contiguous sequences, cut into micro-batches."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from saki_jax.models.sharding import constrain
from saki_jax.rollout.batch import Rollout
from saki_jax.train.objective import Signals
from saki_jax.train.routing import Routed


@struct.dataclass
class Examples:
    """Rows as the trainer sees them: prompt and response contiguous, right-padded, S = P + T.

    A micro-batch has the rows of one forward pass; with an axis in front of all arrays the same
    struct holds all micro-batches of a step.
    """

    sequence: Int[Array, "*A B S"]
    prompt_length: Int[Array, "*A B"]
    tokens: Int[Array, "*A B T"]
    routed: Routed
    signals: Signals
    weights: Float[Array, "*A B T"]  # of each token in the loss, 0 where not valid


def sequences(rollout: Rollout) -> Int[Array, "B S"]:
    """[prompt + response] of each row without a gap, zeros behind; S = P + T.

    Rows that are not trained because a model emitted nothing finite are zeros altogether: the
    gradient of a masked NaN is still NaN, so what caused it must not be fed again.
    """
    prompts = rollout.prompts
    width = prompts.tokens.shape[1] + rollout.tokens.shape[1]
    column = jnp.arange(width)[None, :]
    offset = column - prompts.length[:, None]
    prompt = jnp.pad(prompts.tokens, ((0, 0), (0, rollout.tokens.shape[1])))
    response = jnp.take_along_axis(
        rollout.tokens, jnp.clip(offset, 0, rollout.tokens.shape[1] - 1), axis=1
    )
    held = (column < (prompts.length + rollout.length)[:, None]) & ~rollout.nonfinite[:, None]
    return jnp.where(held, jnp.where(offset < 0, prompt, response), 0)


def cut(rows: Any, micro_batch: int, *, by_length: bool = False) -> Any:
    """Rows [B, ...] as A = ceil(B / micro_batch) micro-batches [A, micro_batch, ...].

    The last rows are filled with zeros (valid False), so no row is lost. Micro-batch i takes the
    rows i, i + A, ...: each device of a mesh then has the rows that it already holds. `by_length`
    puts rows of like length together instead, which moves them between devices.
    """
    if by_length:
        order = jnp.argsort(rows.routed.valid.sum(axis=1))
        rows = jax.tree.map(lambda x: x[order], rows)

    def one(x: jax.Array) -> jax.Array:
        count = -(-x.shape[0] // micro_batch)
        padding = count * micro_batch - x.shape[0]
        x = jnp.pad(x, ((0, padding),) + ((0, 0),) * (x.ndim - 1))
        if by_length:
            x = x.reshape(count, micro_batch, *x.shape[1:])
        else:
            x = x.reshape(micro_batch, count, *x.shape[1:]).swapaxes(0, 1)
        return constrain(x, None, "batch", *(None,) * (x.ndim - 2))

    return jax.tree.map(one, rows)


def bucket_widths(response_length: int, buckets: int) -> tuple[int, ...]:
    """Rising widths, each about half of the next, the last of them T.

    >>> bucket_widths(7168, 4)
    (896, 1792, 3584, 7168)
    >>> bucket_widths(5, 4)
    (1, 2, 3, 5)
    """
    return tuple(sorted({-(-response_length // 2**i) for i in range(buckets)}))


def narrowed(micro: Examples, width: int) -> Examples:
    """The rows of a micro-batch with the first `width` response columns.

    Nothing is lost where no row is longer: what stands behind a row's end is seen by nobody.
    """
    dropped = micro.tokens.shape[1] - width
    if dropped == 0:
        return micro

    def first(tree: Any) -> Any:
        return jax.tree.map(lambda x: x[:, :width], tree)

    return Examples(
        sequence=micro.sequence[:, : micro.sequence.shape[1] - dropped],
        prompt_length=micro.prompt_length,
        tokens=first(micro.tokens),
        routed=first(micro.routed),
        signals=first(micro.signals),
        weights=first(micro.weights),
    )
