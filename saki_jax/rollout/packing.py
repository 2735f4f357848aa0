"""Rows of different length, one behind the other in lines of equal width.

A forward pass costs what its slots are, filled or not. Rows of prompt and response differ in length
by an order of magnitude, so they are packed into lines before a model reads them:

    line 0   [ prompt 3 | response 3 | prompt 0 | response 0 | padding ]
    line 1   [ prompt 2 | response 2 | prompt 5 | response 5 | prompt 1 | response 1 ]

A pass is a fixed number of lines, and there are as many passes as the tokens at hand need: shapes
are static, the trip count is not. Whatever belongs to a response token (its id, its log p, a mask)
stands in the slot of the token *before* it, where a model predicts it.
"""

import math
from dataclasses import dataclass
from typing import no_type_check

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Int, Shaped

from saki_jax.models.sharding import constrain
from saki_jax.rollout.batch import Prompts

# So many rows of the greatest length fit into a line where the budget allows. First fit then leaves
# at most a fifth of the lines empty; with lines for one row, rows of a bit over half would leave
# nearly a half. Wider lines gain little, and attention may look at more of them.
LONGEST_PER_LINE = 4


@dataclass(frozen=True)
class Shape:
    """The static side of a packing: at most `passes` passes of `lines` lines of `width` slots."""

    passes: int
    lines: int
    width: int


def shape_for(rows: int, longest: int, tokens: int, shards: int = 1) -> Shape:
    """The shape with about `tokens` slots a pass; room for any `rows` rows up to `longest`.

    Args:
      rows: B.
      longest: most tokens of a row.
      tokens: the budget. A pass has at least one line a shard, a line at least `longest` slots.
      shards: devices that the lines of a pass are spread over, each with equally many.

    >>> shape_for(rows=512, longest=8192, tokens=65536)
    Shape(passes=64, lines=2, width=32768)
    >>> shape_for(rows=512, longest=8192, tokens=65536, shards=16)
    Shape(passes=32, lines=16, width=8192)
    """
    per_line = min(max(tokens // (longest * shards), 1), LONGEST_PER_LINE, rows)
    width = per_line * longest
    # First fit opens a line only where no other has room for one more of the longest, so all lines
    # but one hold at least `per_line` rows.
    needed = -(-rows // per_line)
    lines = max(min(tokens // width, needed) // shards, 1) * shards
    return Shape(passes=-(-needed // lines), lines=lines, width=width)


@no_type_check
@struct.dataclass
class Packing:
    """Where the rows of a batch lie.

    Attributes:
      shape: passes A, lines M, slots L.
      passes: how many passes hold a token; the rest need not be made.
      prompt_length: of each row.
      response_length: of each row. A row with 0 is left out: it lies nowhere.
      first: slot of the row's first token, counted through all lines of all passes.
      segment: 1, 2, .. rising along a line; the row's id among the segments of its line.
    """

    shape: Shape = struct.field(pytree_node=False)
    passes: Int[Array, ""]
    prompt_length: Int[Array, "B"]
    response_length: Int[Array, "B"]
    first: Int[Array, "B"]
    segment: Int[Array, "B"]

    def sequence_slots(self, width: int) -> Int[Array, "B width"]:
        """The slot of each token of prompt + response; no slot at all behind a row's end."""
        held = jnp.where(self.response_length > 0, self.prompt_length + self.response_length - 1, 0)
        return self._slots(self.first, held, width)

    def response_slots(self, width: int) -> Int[Array, "B width"]:
        """The slot that predicts each response token; no slot at all behind a row's end."""
        return self._slots(self.first + self.prompt_length - 1, self.response_length, width)

    def _slots(self, first: jax.Array, held: jax.Array, width: int) -> jax.Array:
        shape = self.shape
        column = jnp.arange(width, dtype=jnp.int32)[None, :]
        nowhere = shape.passes * shape.lines * shape.width
        return jnp.where(column < held[:, None], first[:, None] + column, nowhere)

    def spread(
        self, values: Shaped[Array, "B N"], slots: Int[Array, "B N"]
    ) -> Shaped[Array, "A M L"]:
        """Values into their slots, zeros (False) into all others."""
        shape = (self.shape.passes, self.shape.lines, self.shape.width)
        flat = jnp.zeros(math.prod(shape), values.dtype).at[slots].set(values, mode="drop")
        return constrain(flat.reshape(shape), None, "batch", None)

    def collect(
        self, values: Shaped[Array, "A M L"], slots: Int[Array, "B N"]
    ) -> Shaped[Array, "B N"]:
        """Values back from their slots, zeros (False) where a row has none."""
        found = values.reshape(-1).at[slots].get(mode="fill", fill_value=0)
        return constrain(found, "batch", None)


def pack(prompts: Prompts, response_length: Int[Array, "B"], shape: Shape) -> Packing:
    """First fit decreasing: longest row first, each into the first line that has room for it.

    A row's last response token is not read (nothing follows it), so a row has prompt + response - 1
    tokens. Rows without a response are left out. Equal lengths go in the order of the rows.
    """
    fed = jnp.where(response_length > 0, prompts.length + response_length - 1, 0)
    fed = constrain(fed, None)  # the plan is small and made by every device
    order = jnp.argsort(-fed, stable=True)

    def place(free: jax.Array, size: jax.Array) -> tuple[jax.Array, jax.Array]:
        line = jnp.argmax(free >= size).astype(jnp.int32)
        first = line * shape.width + shape.width - free[line]
        return free.at[line].add(-size), first

    empty = jnp.full(shape.passes * shape.lines, shape.width, jnp.int32)
    free, first = jax.lax.scan(place, empty, fed[order].astype(jnp.int32))
    lines = (free < shape.width).sum()
    return Packing(
        shape=shape,
        passes=(lines + shape.lines - 1) // shape.lines,
        prompt_length=prompts.length,
        response_length=response_length,
        first=jnp.zeros_like(first).at[order].set(first),
        segment=jnp.zeros_like(first).at[order].set(jnp.arange(1, len(order) + 1)),
    )


def packed_sequences(
    packing: Packing, prompts: Prompts, tokens: Int[Array, "B T"]
) -> tuple[Int[Array, "A M L"], Int[Array, "A M L"]]:
    """(token ids, segment ids) of all lines; 0 and 0 in slots that hold nothing.

    What stands behind the end of a prompt or a response reaches no line.
    """
    joined = join(prompts, tokens)
    slots = packing.sequence_slots(joined.shape[1])
    segment = jnp.broadcast_to(packing.segment[:, None], joined.shape)
    return packing.spread(joined, slots), packing.spread(segment, slots)


def join(prompts: Prompts, tokens: Int[Array, "B T"]) -> Int[Array, "B J"]:
    """Prompt and response of each row without a gap, right-padded with anything; J = P + T - 1.

    The last response token is left out where it would stand in column P + T - 1: nothing follows.
    """
    width = prompts.tokens.shape[1] + tokens.shape[1] - 1
    column = jnp.arange(width)[None, :]
    padded = jnp.pad(prompts.tokens, ((0, 0), (0, tokens.shape[1] - 1)))
    offset = jnp.clip(column - prompts.length[:, None], 0, tokens.shape[1] - 1)
    response = jnp.take_along_axis(tokens, offset, axis=1)
    return jnp.where(column < prompts.length[:, None], padded, response)
