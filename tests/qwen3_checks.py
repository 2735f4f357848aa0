"""Comparisons of the model with given logits, shared by the golden and the live tests."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from saki_jax.models.lm import LanguageModel

TOLERANCE = 1e-4  # float32 logits of the port against float32 logits of torch


def jitted(lm: LanguageModel) -> LanguageModel:
    """The same model; compiled whole, which costs less than compiling operation by operation."""
    return dataclasses.replace(lm, forward=jax.jit(lm.forward), logits=jax.jit(lm.logits))


def assert_same_logits(ours: jax.Array, theirs: np.ndarray) -> None:
    """Within the tolerance everywhere, and the same argmax."""
    assert ours.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(ours), theirs, rtol=0, atol=TOLERANCE)
    np.testing.assert_array_equal(np.argmax(ours, -1), np.argmax(theirs, -1))


def full_logits(lm: LanguageModel, params: dict, tokens: np.ndarray) -> jax.Array:
    """Logits [B, J, V] of whole sequences, without a cache."""

    lm = jitted(lm)
    hidden, cache = lm.forward(params, jnp.asarray(tokens, jnp.int32), None, None)
    assert cache is None
    return lm.logits(params, hidden)


def cached_logits(
    lm: LanguageModel, params: dict, tokens: np.ndarray, lengths: list[int], block: int
) -> np.ndarray:
    """Logits [B, J, V] from a ragged prefill, one-token steps and blocks, NaN where not computed.

    Rows are prefilled together, right-padded with a foreign id, to ``lengths``; then each takes one
    token, then blocks of ``block`` until the longest row is through. Rows that are through go on
    past the end of their cache, where writes must be dropped.
    """
    rows, total = tokens.shape
    out = np.full((rows, total, lm.vocab_size), np.nan, np.float32)
    lm = jitted(lm)
    at = np.array(lengths)
    cache = lm.init_cache(rows, total)

    def feed(cache, count: int, valid: np.ndarray, start: np.ndarray):
        picked = np.zeros((rows, count), np.int32)  # 0 behind the end of a row
        for row in range(rows):
            part = tokens[row, start[row] : start[row] + min(count, valid[row])]
            picked[row, : len(part)] = part
        hidden, cache = lm.forward(
            params, jnp.asarray(picked), jnp.asarray(start, jnp.int32), cache
        )
        logits = np.asarray(lm.logits(params, hidden))
        for row in range(rows):
            kept = max(min(count, valid[row], total - start[row]), 0)
            out[row, start[row] : start[row] + kept] = logits[row, :kept]
        return cache

    cache = feed(cache, max(lengths), at, np.zeros_like(at))
    for count in [1] + [block] * -(-(total - min(lengths) - 1) // block):
        cache = feed(cache, count, np.full(rows, count), at)
        at = at + count
    return out
