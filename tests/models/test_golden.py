"""The port against golden logits of transformers' torch models, without torch.

Files are made by scripts/make_golden_qwen3.py, which says when to renew them.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen3_checks import assert_same_logits, cached_logits, full_logits
from saki_jax.models import hf
from saki_jax.models.qwen3 import language_model

GOLDEN = Path(__file__).parent / "golden"
VARIANTS = ["tied_2to1", "untied_4to1", "square_1to1", "llama_3to1"]


@pytest.fixture(params=VARIANTS)
def case(request):
    """(language model, parameters, golden arrays) of a variant, all float32."""
    folder = GOLDEN / request.param
    config, params = hf.load(folder, dtype=jnp.float32)
    return language_model(config, jnp.float32), params, np.load(folder / "golden.npz")


def test_q16_parity_runs_at_highest_precision():
    # With an accelerator's default, float32 products are bfloat16 or TF32 and prove nothing.
    assert jax.config.jax_default_matmul_precision == "highest"


def test_full_forward(case):
    lm, params, golden = case
    assert_same_logits(full_logits(lm, params, golden["tokens"]), golden["logits"])


@pytest.mark.parametrize("block", [1, 4])
def test_ragged_cached_steps(case, block):
    lm, params, golden = case
    ours = cached_logits(lm, params, golden["tokens"].astype(np.int32), [13, 5], block)
    assert_same_logits(jnp.asarray(ours), golden["logits"])


@pytest.mark.parametrize("variant", ["tied_2to1", "llama_3to1"])
def test_positions_beyond_4000(variant):
    config, params = hf.load(GOLDEN / variant, dtype=jnp.float32)
    lm, golden = language_model(config, jnp.float32), np.load(GOLDEN / variant / "golden.npz")
    ours = full_logits(lm, params, golden["long_tokens"])[:, golden["long_positions"]]
    assert_same_logits(ours, golden["long_logits"])


def test_the_comparison_sees_a_wrong_theta():
    folder = GOLDEN / "tied_2to1"
    config, params = hf.load(folder, dtype=jnp.float32)
    wrong = config.__class__(**(vars(config) | {"rope_theta": 1e4}))
    golden = np.load(folder / "golden.npz")
    with pytest.raises(AssertionError):
        assert_same_logits(
            full_logits(language_model(wrong, jnp.float32), params, golden["tokens"]),
            golden["logits"],
        )


def test_a_bfloat16_copy_of_bfloat16_files_loses_nothing(case):
    lm, params, golden = case
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    ours = full_logits(lm, half, golden["tokens"])
    np.testing.assert_array_equal(ours, full_logits(lm, params, golden["tokens"]))


def test_bfloat16_compute_emits_float32_logits_near_the_float32_ones():
    config, params = hf.load(GOLDEN / "tied_2to1", dtype=jnp.bfloat16)
    golden = np.load(GOLDEN / "tied_2to1" / "golden.npz")
    ours = full_logits(language_model(config, jnp.bfloat16), params, golden["tokens"])
    assert ours.dtype == jnp.float32
    difference = np.abs(np.asarray(ours) - golden["logits"])
    assert 0.001 < difference.mean() < 0.05  # rounding of activations, not of logits
    # Logits rounded to bfloat16 would all be representable in it.
    assert (ours != ours.astype(jnp.bfloat16).astype(jnp.float32)).mean() > 0.9
