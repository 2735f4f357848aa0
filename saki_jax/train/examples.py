"""A rollout as the trainer reads it: rows packed into lines, micro-batch by micro-batch."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from saki_jax.rollout.batch import Rollout
from saki_jax.rollout.packing import Shape, pack, packed_sequences
from saki_jax.train.objective import Signals
from saki_jax.train.routing import Routed


@struct.dataclass
class Examples:
    """Packed lines (`rollout.packing`): B lines of T slots are the rows of one forward pass.

    Several rows of the rollout lie in a line, told apart by `segment`. What belongs to a response
    token stands in the slot of the token before it, which predicts it. With an axis in front of all
    arrays the same struct holds all micro-batches of a step.
    """

    sequence: Int[Array, "*A B T"]  # what the models read
    segment: Int[Array, "*A B T"]  # 0 where a slot is empty
    tokens: Int[Array, "*A B T"]  # y, the response token predicted here
    routed: Routed
    signals: Signals
    weights: Float[Array, "*A B T"]  # of each token in the loss, 0 where not valid


def packed_examples(
    rollout: Rollout,
    routed: Routed,
    signals: Signals,
    weights: Float[Array, "B T"],
    shape: Shape,
) -> tuple[Examples, Int[Array, ""]]:
    """All micro-batches of a step, and how many of them hold a token (they come first).

    Rows that are not trained because a model emitted nothing finite are left out altogether: the
    gradient of a masked NaN is still NaN, so what caused it must not be fed again. What stands
    behind a row's end gets into no line either.
    """
    length = jnp.where(rollout.nonfinite, 0, rollout.length)
    packing = pack(rollout.prompts, length, shape)
    slots = packing.response_slots(rollout.tokens.shape[1])

    def spread(fields: Any) -> Any:
        return jax.tree.map(lambda x: packing.spread(x, slots), fields)

    sequence, segment = packed_sequences(packing, rollout.prompts, rollout.tokens)
    examples = Examples(
        sequence=sequence,
        segment=segment,
        tokens=spread(rollout.tokens),
        routed=spread(routed),
        signals=spread(signals),
        weights=spread(weights),
    )
    return examples, packing.passes
