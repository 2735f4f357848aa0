"""Cache writes at ragged positions, past the end, and rollback over poisoned slots."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen3_checks import jitted
from saki_jax.models import cache as caches
from saki_jax.models.config import PRESETS
from saki_jax.models.qwen3 import init_params, language_model

TINY = PRESETS["tiny"]


@pytest.mark.parametrize("compiled", [True, False])
def test_j01_a_block_past_the_end_is_cut_and_nothing_moves(compiled):
    old = jnp.arange(2 * 10.0).reshape(2, 10, 1, 1)
    new = 100 + jnp.arange(2 * 4.0).reshape(2, 4, 1, 1)
    write = jax.jit(caches.write) if compiled else caches.write
    keys, values = write((old, -old), new, -new, jnp.array([8, 2]))
    expected = np.array(old)
    expected[0, 8:10] = new[0, :2]  # two of the four fit
    expected[1, 2:6] = new[1]
    np.testing.assert_array_equal(keys, expected)
    np.testing.assert_array_equal(values, -expected)


def test_j01_a_block_wholly_behind_the_end_changes_nothing():
    old = jnp.ones((1, 10, 1, 1))
    keys, _ = caches.write((old, old), jnp.zeros((1, 4, 1, 1)), old[:, :4], jnp.array([10]))
    np.testing.assert_array_equal(keys, old)


def test_shapes_are_apart_per_layer_and_rows_come_first():
    cache = language_model(TINY, jnp.float32).init_cache(3, 7)
    assert len(cache) == TINY.num_layers
    for array in jax.tree.leaves(cache):
        assert array.shape == (3, 7, TINY.num_kv_heads, TINY.head_dim)
        assert array.dtype == jnp.float32


def test_the_cache_is_float32_on_cpu_even_for_bfloat16_compute():
    assert caches.cache_dtype(jnp.bfloat16) == jnp.float32
    cache = language_model(TINY, jnp.bfloat16).init_cache(1, 2)
    assert jax.tree.leaves(cache)[0].dtype == jnp.float32


def poison(cache, from_slot: jax.Array):
    """NaN keys and large finite values in every slot at or behind ``from_slot`` [B]."""

    def spoil(layer):
        keys, values = layer
        stale = jnp.arange(keys.shape[1])[None, :] >= from_slot[:, None]
        stale = stale[:, :, None, None]
        return jnp.where(stale, jnp.nan, keys), jnp.where(stale, 1e30, values)

    return tuple(spoil(layer) for layer in cache)


@pytest.mark.parametrize("count", [1, 4])
def test_stale_slots_are_never_seen(count):
    lm, params = jitted(language_model(TINY, jnp.float32)), init_params(TINY, jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (3, 12), 0, TINY.vocab_size)
    length = jnp.array([8, 3, 5])
    _, cache = lm.forward(params, tokens[:, :8], jnp.zeros(3, int), lm.init_cache(3, 12))
    # The short rows' slots behind `length` hold the keys of padding, as after a rollback.
    clean, clean_cache = lm.forward(params, tokens[:, 8 : 8 + count], length, cache)
    spoilt, spoilt_cache = lm.forward(
        params, tokens[:, 8 : 8 + count], length, poison(cache, length)
    )
    assert jnp.isfinite(spoilt).all()
    np.testing.assert_array_equal(spoilt, clean)
    for ours, theirs in zip(
        jax.tree.leaves(spoilt_cache), jax.tree.leaves(clean_cache), strict=True
    ):
        for row, end in enumerate(length + count):
            np.testing.assert_array_equal(ours[row, :end], theirs[row, :end])


def test_a_row_at_the_very_end_of_its_cache_keeps_its_entries():
    lm, params = jitted(language_model(TINY, jnp.float32)), init_params(TINY, jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (2, 8), 0, TINY.vocab_size)
    whole, _ = lm.forward(params, tokens, None, None)
    _, cache = lm.forward(params, tokens[:, :7], jnp.zeros(2, int), lm.init_cache(2, 8))
    # Row 0 has one slot left and is fed four tokens; row 1 is far from the end.
    block = jnp.stack([jnp.concatenate([tokens[0, 7:], tokens[0, :3]]), tokens[1, 2:6]])
    hidden, after = lm.forward(params, block, jnp.array([7, 2]), cache)
    np.testing.assert_allclose(hidden[0, 0], whole[0, 7], atol=1e-5)
    np.testing.assert_allclose(hidden[1], whole[1, 2:6], atol=1e-5)
    for before, now in zip(jax.tree.leaves(cache), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(now[0, :7], before[0, :7])
