"""Reading two arrays of logits tile by tile, so that temporaries are [*B, tile], never [*B, V]."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

_VOCAB_AXIS = "tensor"  # the mesh axis over which a language model's head spreads the vocabulary


def default_tile() -> int:
    """Vocabulary entries read at a time, in all shards together.

    The same for any number of rows, so that a row's sums do not depend on its neighbours: on CPU a
    size that its caches hold for some hundred rows, elsewhere one that outweighs a kernel's launch.
    """
    return 4096 if jax.default_backend() == "cpu" else 16384


def fold_vocabulary(
    step: Callable,
    init: Any,
    logits_p: Float[Array, "*B V"],
    logits_t: Float[Array, "*B V"],
    tile: int,
) -> Any:
    """Folds ``step(carry, a [*B, W], b [*B, W], ids [W]) -> carry`` over float32 tiles.

    Every entry is read once; ids may come in any order. The remainder is a narrower last tile, so
    nothing is padded and nothing copied, and a vocabulary that fits one tile takes no loop. Where
    the mesh in context spreads the vocabulary over devices, a tile takes an equal piece of each
    device's part: no logits move.
    """
    vocab = logits_p.shape[-1]
    if vocab <= tile:
        a, b = (logits.astype(jnp.float32) for logits in (logits_p, logits_t))
        return step(init, a, b, jnp.arange(vocab, dtype=jnp.int32))

    shards = _vocabulary_shards(vocab)
    part = vocab // shards
    width = max(tile // shards, 1)
    read_p, read_t = (_reader(logits, shards) for logits in (logits_p, logits_t))
    starts = jnp.arange(shards, dtype=jnp.int32)[:, None] * part

    def visit(carry, first, width):
        ids = starts + first + jnp.arange(width, dtype=jnp.int32)[None, :]
        return step(carry, read_p(first, width), read_t(first, width), ids.reshape(-1))

    whole = part // width
    carry = lax.fori_loop(0, whole, lambda i, c: visit(c, i * width, width), init)
    rest = part - whole * width
    return visit(carry, whole * width, rest) if rest else carry


def _vocabulary_shards(vocab: int) -> int:
    """Over how many devices the vocabulary may lie; 1 without a mesh in context."""
    shards = dict(jax.sharding.get_abstract_mesh().shape).get(_VOCAB_AXIS, 1)
    return shards if vocab % shards == 0 else 1


def _reader(logits: Float[Array, "*B V"], shards: int) -> Callable:
    """``(first, width) -> float32 [*B, shards * width]``, converting no more than is asked for."""
    *rows, vocab = logits.shape
    # XLA on CPU would convert a whole 16-bit array before slicing, so slice it as integers.
    narrow = logits.dtype.itemsize == 2
    source = lax.bitcast_convert_type(logits, jnp.uint16) if narrow else logits
    if shards > 1:
        source = source.reshape(*rows, shards, vocab // shards)

    def read(first, width):
        piece = lax.dynamic_slice_in_dim(source, first, width, axis=-1)
        if narrow:
            piece = lax.bitcast_convert_type(piece, logits.dtype)
        return piece.astype(jnp.float32).reshape(*rows, shards * width)

    return read
