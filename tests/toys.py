"""Lookup-table language models with a real cache, and counts of short sequences.

A model here knows its next-token logits from a table indexed by the last n tokens and by the
parity of the position. It finds those tokens in a cache of slots as attention does: by a masked
comparison of slot keys, then a sum over slot values. So offsets, rollback, stale slots and writes
past the end matter exactly as in a transformer, while all arithmetic is a gather: two schedules of
the engine must agree to the bit.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from saki_jax.models.lm import LanguageModel
from saki_jax.models.segments import segment_starts
from saki_jax.rollout.batch import Prompts

PERIOD = 2  # the table depends on position % PERIOD, as RoPE depends on the position


def num_contexts(vocab_size: int, order: int) -> int:
    """Rows of a table: (position % PERIOD) x (the last `order` tokens, V standing for none)."""
    return PERIOD * (vocab_size + 1) ** order


def random_table(seed: int, vocab_size: int, order: int = 2, scale: float = 1.0) -> jax.Array:
    """Logits [contexts, V], normal with the given scale."""
    rng = np.random.default_rng(seed)
    shape = (num_contexts(vocab_size, order), vocab_size)
    return jnp.asarray(rng.normal(scale=scale, size=shape), jnp.float32)


def blend(table: jax.Array, other: jax.Array, weight: float) -> jax.Array:
    """A student that differs from its teacher by `weight` of another table."""
    return (1 - weight) * table + weight * other


def context_index(history: Sequence[int], vocab_size: int, order: int) -> int:
    """The table row for the token that follows `history` (NumPy side of the same definition)."""
    position = len(history) - 1  # of the token that is fed last
    index = position % PERIOD
    for lag in range(order):
        token = history[-1 - lag] if lag < len(history) else vocab_size
        index = index * (vocab_size + 1) + token
    return index


def lookup_model(vocab_size: int, order: int = 2) -> LanguageModel:
    """The model described above; its params are a table [contexts, V]."""

    def init_cache(rows: int, slots: int) -> dict:
        return {
            "key": jnp.zeros((rows, slots), jnp.float32),  # position of the token
            "value": jnp.zeros((rows, slots), jnp.float32),  # the token
        }

    def write(row: jax.Array, new: jax.Array, start: jax.Array) -> jax.Array:
        return row.at[start + jnp.arange(new.shape[0])].set(new, mode="drop")

    def forward(params, tokens, start, cache, segment_ids=None):
        del params
        rows, new = tokens.shape
        cached = cache is not None
        if not cached:
            start = jnp.zeros((rows,), jnp.int32)
            cache = init_cache(rows, new)
        own_slot = start[:, None] + jnp.arange(new)[None, :]  # [B, J]
        first = _first_slot(tokens, segment_ids)
        position = own_slot - first
        cache = {
            "key": jax.vmap(write)(cache["key"], position.astype(jnp.float32), start),
            "value": jax.vmap(write)(cache["value"], tokens.astype(jnp.float32), start),
        }
        slot = jnp.arange(cache["key"].shape[1])[None, None, :]
        visible = (first[:, :, None] <= slot) & (slot <= own_slot[:, :, None])  # [B, J, S]
        index = position % PERIOD
        for lag in range(order):
            match = cache["key"][:, None, :] == (position[:, :, None] - lag).astype(jnp.float32)
            # Masked before the product, as a softmax of masked scores gives exact zeros; a stale
            # value that is finite then contributes nothing.
            weight = jnp.where(visible & match, 1.0, 0.0)
            token = (weight * cache["value"][:, None, :]).sum(-1).astype(jnp.int32)
            token = jnp.where(position >= lag, token, vocab_size)
            index = index * (vocab_size + 1) + token
        return index[:, :, None].astype(jnp.float32), cache if cached else None

    def logits(params, hidden):
        return params[hidden[..., 0].astype(jnp.int32)]

    return LanguageModel(vocab_size, init_cache, forward, logits)


def scripted_model(vocab_size: int) -> LanguageModel:
    """Next-token logits by absolute position alone; params is a table [positions, V].

    For tests that dictate what is proposed, accepted and corrected where. The history goes through
    the cache of `lookup_model`, so that rows keep their own positions.
    """

    def forward(params, tokens, start, cache, segment_ids=None):
        del params
        if cache is None:
            start = jnp.zeros((tokens.shape[0],), jnp.int32)
        position = start[:, None] + jnp.arange(tokens.shape[1])[None, :]
        position = position - _first_slot(tokens, segment_ids)
        return position[:, :, None].astype(jnp.float32), cache

    def logits(params, hidden):
        return params[jnp.clip(hidden[..., 0].astype(jnp.int32), 0, params.shape[0] - 1)]

    return LanguageModel(vocab_size, lookup_model(vocab_size).init_cache, forward, logits)


def _first_slot(tokens: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
    """Where each token's sequence begins in its row, [B, J]."""
    return jnp.zeros_like(tokens) if segment_ids is None else segment_starts(segment_ids)


def point_logits(token: int, vocab_size: int, height: float = 60.0) -> np.ndarray:
    """Logits that put all but about e^-height of the mass on one token."""
    return np.where(np.arange(vocab_size) == token, height, 0.0).astype(np.float32)


def with_cache_slots(model: LanguageModel, slots: Callable[[int], int]) -> LanguageModel:
    """The model with another cache length than asked for."""
    return LanguageModel(
        model.vocab_size,
        lambda rows, asked: model.init_cache(rows, slots(asked)),
        model.forward,
        model.logits,
    )


def with_poisoned_cache(model: LanguageModel, value: float = 3e4) -> LanguageModel:
    """The model with NaN keys and large finite values in every slot that it must not see.

    Before each forward all slots from ``start`` on are overwritten: whatever a rollback, a finished
    row or a padded prefill left there. Works for caches whose leaves come in (key, value) pairs.
    (Values stay finite: a softmax weight of exactly 0 times NaN is NaN in correct code.)
    """

    def poison(cache, start):
        leaves, tree = jax.tree.flatten(cache)
        poisoned = []
        for i, leaf in enumerate(leaves):
            slot = jnp.arange(leaf.shape[1]).reshape(1, -1, *(1,) * (leaf.ndim - 2))
            stale = slot >= start.reshape(-1, 1, *(1,) * (leaf.ndim - 2))
            poisoned.append(jnp.where(stale, jnp.nan if i % 2 == 0 else value, leaf))
        return jax.tree.unflatten(tree, poisoned)

    def forward(params, tokens, start, cache, segment_ids=None):
        if cache is not None:
            cache = poison(cache, start)
        return model.forward(params, tokens, start, cache, segment_ids)

    return LanguageModel(model.vocab_size, model.init_cache, forward, model.logits)


def prompts_of(
    rows: Iterable[Sequence[int]], sequence_id: Sequence[int] | None = None, width: int = 0
) -> Prompts:
    """Prompts from lists of ids, right-padded (with a token that would matter if it were read)."""
    rows = [list(row) for row in rows]
    length = np.array([len(row) for row in rows], np.int32)
    width = max(width, int(length.max()))
    tokens = np.ones((len(rows), width), np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    ids = np.arange(len(rows)) if sequence_id is None else np.asarray(sequence_id)
    return Prompts(
        tokens=jnp.asarray(tokens), length=jnp.asarray(length), sequence_id=jnp.asarray(ids)
    )


def responses(rollout) -> list[tuple[int, ...]]:
    """The committed tokens of each row."""
    tokens, length = np.asarray(rollout.tokens), np.asarray(rollout.length)
    return [tuple(row[:n].tolist()) for row, n in zip(tokens, length, strict=True)]


def count_responses(rollout, law: dict[tuple[int, ...], float]) -> tuple[np.ndarray, np.ndarray]:
    """Observed counts and probabilities, aligned; raises KeyError for an impossible response."""
    order = {response: i for i, response in enumerate(law)}
    observed = np.zeros(len(law))
    for response, group in itertools.groupby(sorted(responses(rollout))):
        observed[order[response]] += len(list(group))
    return observed, np.array(list(law.values()))


def chi_square_p_value(observed: np.ndarray, probability: np.ndarray, least: float = 10.0) -> float:
    """The p-value of the counts under the law; cells expecting under `least` are put together."""
    from scipy import stats

    expected = probability * observed.sum()
    small = expected < least
    observed = np.append(observed[~small], observed[small].sum())
    expected = np.append(expected[~small], expected[small].sum())
    if expected[-1] == 0:
        observed, expected = observed[:-1], expected[:-1]
    statistic = ((observed - expected) ** 2 / expected).sum()
    return float(stats.chi2.sf(statistic, len(expected) - 1))
