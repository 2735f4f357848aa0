"""The port against transformers' torch models, live (extra `parity`)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen3_checks import assert_same_logits, cached_logits, full_logits
from saki_jax.models import hf
from saki_jax.models.qwen3 import language_model

pytestmark = pytest.mark.parity

VARIANTS = ["tied_2to1", "untied_4to1", "square_1to1", "llama_3to1"]


@pytest.fixture(params=[(name, seed) for name in VARIANTS for seed in (1, 2)], ids=str)
def case(request, tmp_path):
    """(torch model, language model, parameters, folder) of a random checkpoint."""
    from scripts.make_golden_qwen3 import build

    torch_model = build(*request.param)
    torch_model.save_pretrained(tmp_path / "torch", max_shard_size="20KB")
    config, params = hf.load(tmp_path / "torch", dtype=jnp.float32)
    return torch_model, language_model(config, jnp.float32), params, config


def _tokens(rows: int, length: int) -> np.ndarray:
    return np.random.default_rng(length).integers(0, 61, (rows, length))


def test_q16_parity_runs_at_highest_precision():
    assert jax.config.jax_default_matmul_precision == "highest"


def test_full_forward(case):
    from scripts.make_golden_qwen3 import logits

    torch_model, lm, params, _ = case
    tokens = _tokens(2, 40)
    assert_same_logits(full_logits(lm, params, tokens), logits(torch_model, tokens))


def test_ragged_cached_steps(case):
    from scripts.make_golden_qwen3 import logits

    torch_model, lm, params, _ = case
    tokens = _tokens(3, 40)
    ours = cached_logits(lm, params, tokens, [17, 1, 9], block=8)
    assert_same_logits(jnp.asarray(ours), logits(torch_model, tokens))


def test_q08_left_padding_of_the_reference_gives_the_same_rows(case):
    import torch

    torch_model, lm, params, _ = case
    tokens, pad = _tokens(2, 7), 4  # lengths 3 and 7
    left = np.concatenate([np.zeros((1, pad), int), tokens[:1, :3]], axis=1)
    batch = torch.tensor(np.concatenate([left, tokens[1:]]))
    mask = torch.ones_like(batch)
    mask[0, :pad] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        theirs = torch_model(batch, attention_mask=mask, position_ids=positions).logits.numpy()
    ours = full_logits(lm, params, tokens)  # right-padded: what follows is never seen
    assert_same_logits(ours[0, :3], theirs[0, pad:])
    assert_same_logits(ours[1], theirs[1])


@pytest.mark.parametrize("name", ["tied_2to1", "llama_3to1"])
def test_positions_beyond_4000(name, tmp_path):
    from scripts.make_golden_qwen3 import build, logits

    torch_model = build(name, seed=3)
    torch_model.save_pretrained(tmp_path / "torch")
    config, params = hf.load(tmp_path / "torch", dtype=jnp.float32)
    tokens = _tokens(1, 4200)
    ours = full_logits(language_model(config, jnp.float32), params, tokens)
    assert_same_logits(ours[:, 4000:], logits(torch_model, tokens)[:, 4000:])


def test_an_export_is_loaded_by_transformers_with_equal_logits(case, tmp_path):
    from transformers import AutoModelForCausalLM

    from scripts.make_golden_qwen3 import logits

    torch_model, _, params, config = case
    hf.save(tmp_path / "ours", config, params, dtype=jnp.float32)
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info.values())
    tokens = _tokens(2, 30)
    np.testing.assert_array_equal(logits(again, tokens), logits(torch_model, tokens))


def test_a_bfloat16_export_is_loaded_bit_for_bit(case, tmp_path):
    from transformers import AutoModelForCausalLM

    torch_model, _, params, config = case
    hf.save(tmp_path / "ours", config, params, dtype=jnp.bfloat16)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    for (name, ours), theirs in zip(
        again.state_dict().items(), torch_model.state_dict().values(), strict=True
    ):
        assert str(ours.dtype) == "torch.bfloat16"
        assert (ours.float() == theirs).all(), name
