"""Heads with more rows than the tokenizer has tokens: what is sampled from them, if anything."""

import dataclasses
from functools import lru_cache

import jax
import jax.numpy as jnp

from saki_jax.models.lm import LanguageModel, Params


@lru_cache(maxsize=16)
def mask_unused_rows(model: LanguageModel, used: int) -> LanguageModel:
    """The model with probability 0 for ids from `used` on: their logits are -inf.

    The other tokens share the mass, so every log-probability that comes of these logits (of p, T,
    q, pi, the reference, a score, the probe, an evaluation) is normalised over them alone, and
    no gradient reaches the rows left out. Equal calls give the same functions, which share what
    was compiled of them.

    Args:
      model: student or teacher; a pair must be masked alike.
      used: the tokenizer's size, one more than the highest id that has a token.
    """

    def logits(params: Params, hidden: jax.Array) -> jax.Array:
        found = model.logits(params, hidden)
        known = (jnp.arange(found.shape[-1]) < used).reshape((1,) * (found.ndim - 1) + (-1,))
        return jnp.where(known, found, -jnp.inf)

    return dataclasses.replace(model, logits=logits)
