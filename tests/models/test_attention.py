"""Grouped-query attention on values that can be worked out by hand."""

import jax
import jax.numpy as jnp
import numpy as np

from saki_jax.models.attention import attend
from saki_jax.models.config import PRESETS

VISIBLE = jnp.ones((1, 1, 1), bool)


def test_q06_key_value_heads_are_repeated_not_tiled():
    q, k = jnp.ones((1, 1, 4, 2)), jnp.ones((1, 1, 2, 2))
    v = jnp.stack([jnp.full((1, 1, 2), 10.0), jnp.full((1, 1, 2), 20.0)], axis=2)
    ours = attend(q, k, v, VISIBLE)
    np.testing.assert_array_equal(ours[0, 0, :, 0], [10, 10, 20, 20])


def test_q03_scale_is_of_the_head_and_not_of_the_width_per_head():
    config = PRESETS["0.6b"]
    assert config.hidden_size // config.num_heads == 64
    q = jnp.zeros((1, 1, 1, config.head_dim)).at[..., 0].set(10.0)
    k = jnp.zeros((1, 2, 1, config.head_dim)).at[0, 0, 0, 0].set(1.0)
    v = jnp.zeros_like(k).at[0, 0].set(1.0)
    weight = attend(q, k, v, jnp.ones((1, 1, 2), bool))[0, 0, 0, 0]
    assert jnp.isclose(weight, jax.nn.sigmoid(10 * 0.0883883), atol=1e-6)
    assert not jnp.isclose(weight, jax.nn.sigmoid(10 * 0.125), atol=1e-3)


def test_mask_equals_slice():
    rng = np.random.default_rng(1)
    q = jnp.asarray(rng.normal(size=(2, 3, 4, 8)), jnp.float32)
    k, v = jnp.asarray(rng.normal(size=(2, 2, 10, 2, 8)), jnp.float32)
    visible = jnp.broadcast_to(jnp.arange(10) < 6, (2, 3, 10))
    sliced = attend(q, k[:, :6], v[:, :6], jnp.ones((2, 3, 6), bool))
    np.testing.assert_allclose(attend(q, k, v, visible), sliced, atol=1e-6)


def test_what_is_not_visible_may_be_nan_in_keys_and_large_in_values():
    rng = np.random.default_rng(2)
    q = jnp.asarray(rng.normal(size=(1, 2, 2, 4)), jnp.float32)
    k, v = jnp.asarray(rng.normal(size=(2, 1, 5, 1, 4)), jnp.float32)
    visible = jnp.broadcast_to(jnp.arange(5) < 3, (1, 2, 5))
    poisoned = attend(q, k.at[:, 3:].set(jnp.nan), v.at[:, 3:].set(1e30), visible)
    np.testing.assert_array_equal(poisoned, attend(q, k, v, visible))


def test_j03_a_row_that_sees_nothing_is_finite():
    q, k, v = jnp.ones((1, 1, 2, 4)), jnp.ones((1, 3, 1, 4)), jnp.ones((1, 3, 1, 4))
    with jax.debug_nans(True):
        assert jnp.isfinite(attend(q, k, v, jnp.zeros((1, 1, 3), bool))).all()
