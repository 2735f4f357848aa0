"""Rotation by hand-computed values, and the float32 phase."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from saki_jax.models.config import Qwen3Config
from saki_jax.models.layers import Attention
from saki_jax.models.rotary import rotary_tables, rotate


def test_q02_pairs_are_split_halves():
    x = jnp.array([1.0, 2.0, 3.0, 4.0]).reshape(1, 1, 4)
    cos, sin = rotary_tables(jnp.array([1]), 4, 1e6)
    ours = rotate(x, cos, sin).reshape(4)
    np.testing.assert_allclose(ours, [-1.98411, 1.99600, 2.46238, 4.00200], atol=1e-5)
    interleaved = [-1.14264, 1.92208, 2.99600, 4.00300]
    assert not np.allclose(ours, interleaved, atol=1e-3)


@pytest.mark.parametrize("which", [0, 1])
def test_q01_norm_before_rope(which):
    config = Qwen3Config(8, 4, 8, 1, 1, 1, 4)
    attention = Attention(config, nnx.Rngs(params=0))
    for projection in (attention.q_proj, attention.k_proj):
        projection.kernel[...] = jnp.eye(4)
    for norm in (attention.q_norm, attention.k_norm):
        norm.scale[...] = jnp.array([1.0, 2.0, 0.5, 1.5])
    x = jnp.array([1.0, 2.0, 3.0, 4.0]).reshape(1, 1, 4)
    rotation = rotary_tables(jnp.array([[1]]), 4, 1e6)
    ours = attention.project(x, rotation)[which].reshape(4)  # q, then k
    np.testing.assert_allclose(ours, [-0.26360, 1.45840, 0.60320, 2.19235], atol=1e-5)
    wrong_order = [-0.72449, 1.45767, 0.44957, 2.19198]
    assert not np.allclose(ours, wrong_order, atol=1e-3)


def test_q05_phase_is_float32_at_large_positions():
    cos, sin = rotary_tables(jnp.array([4095]), 128, 1e6)
    assert cos.dtype == sin.dtype == jnp.float32
    exact = 4095 * 1e6 ** (-np.arange(0, 128, 2, dtype=np.float64) / 128)
    assert np.abs(np.asarray(cos[0], np.float64) - np.cos(exact)).max() < 5e-4
    assert np.abs(np.asarray(sin[0], np.float64) - np.sin(exact)).max() < 5e-4
    np.testing.assert_allclose(cos[0, [0, 1, 10]], [-0.0659760, 0.3139245, -0.0734621], atol=5e-4)
    rounded = np.asarray(jnp.asarray(exact / 4095, jnp.bfloat16), np.float64)
    assert np.abs(np.cos(4095 * rounded) - np.cos(exact)).max() > 1  # what the bound rules out


def test_q05_a_bfloat16_head_is_rotated_by_the_float32_phase():
    x = jnp.ones((1, 1, 128), jnp.bfloat16)
    cos, sin = rotary_tables(jnp.array([4095]), 128, 1e6)
    ours = rotate(x, cos, sin)
    assert ours.dtype == jnp.bfloat16
    exact = np.asarray(rotate(x.astype(jnp.float32), cos, sin))
    np.testing.assert_allclose(np.asarray(ours, np.float32), exact, atol=2**-7)  # last cast only


def test_rotation_keeps_lengths_and_depends_on_differences_only():
    rng = np.random.default_rng(0)
    q, k = jnp.asarray(rng.normal(size=(2, 1, 1, 32)), jnp.float32)

    def product(i: int, j: int) -> float:
        one, other = (rotary_tables(jnp.array([p]), 32, 1e6) for p in (i, j))
        return float(jnp.vdot(rotate(q, *one), rotate(k, *other)))

    assert product(7, 3) == pytest.approx(product(104, 100), abs=1e-4)
    assert product(7, 3) != pytest.approx(product(7, 4), abs=1e-2)
    turned = rotate(q, *rotary_tables(jnp.array([50]), 32, 1e6))
    assert float(jnp.vdot(turned, turned)) == pytest.approx(float(jnp.vdot(q, q)), rel=1e-5)
