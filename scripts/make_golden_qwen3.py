"""Makes the golden checkpoints and logits of tests/models/golden from transformers' torch models.

    python -m venv .venv-parity && .venv-parity/bin/pip install -e '.[test,parity]'
    .venv-parity/bin/python scripts/make_golden_qwen3.py

Renew them only when a variant is added or the reference itself changes, and say so in CHANGELOG.md;
never to make a failing test pass. The live comparison (`pytest -m parity`) uses the same variants.
"""

import argparse
import shutil
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config
from transformers import Qwen3ForCausalLM as Qwen3

GOLDEN = Path(__file__).parent.parent / "tests" / "models" / "golden"
LONG = 4200  # positions beyond 4,000
LONG_KEPT = [0, 1, 2, 63, 511, 2047, 4000, 4095, 4096, 4150, 4199]

_SMALL = {
    "vocab_size": 61,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
    "max_position_embeddings": 8192,
}
# Each name says what is peculiar; head_dim is not hidden/heads in the first two.
VARIANTS = {
    "tied_2to1": _SMALL
    | {
        "hidden_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "tie_word_embeddings": True,
    },
    "untied_4to1": _SMALL
    | {
        "hidden_size": 32,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "tie_word_embeddings": False,
    },
    "square_1to1": _SMALL
    | {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "tie_word_embeddings": True,
    },
    "llama_3to1": _SMALL
    | {
        "hidden_size": 24,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 1e5, "rope_type": "default"},
        "tie_word_embeddings": True,
    },
}


def build(name: str, seed: int = 0) -> PreTrainedModel:
    """A random model of a variant, float32 with weights that bfloat16 holds exactly.

    Norm scales are random as well: at their usual initial value of 1 a forgotten or misplaced one
    would not show.
    """
    config_class, model_class = Qwen3Config, Qwen3
    if name.startswith("llama"):
        config_class, model_class = LlamaConfig, LlamaForCausalLM
    model = model_class(config_class(**VARIANTS[name])).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in model.parameters():
            noise = torch.randn(tensor.shape, generator=generator)
            values = 0.25 * noise if tensor.ndim > 1 else 1 + 0.3 * noise
            tensor.copy_(values.to(torch.bfloat16).to(torch.float32))
    return model


@torch.no_grad()
def logits(model: PreTrainedModel, tokens: np.ndarray) -> np.ndarray:
    """Logits [B, J, V] of whole sequences."""
    return model(torch.tensor(tokens, dtype=torch.long)).logits.float().numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=GOLDEN)
    out = parser.parse_args().out
    rng = np.random.default_rng(2026)
    for name in VARIANTS:
        model = build(name)
        shutil.rmtree(out / name, ignore_errors=True)
        tokens = rng.integers(0, model.config.vocab_size, (2, 24))
        arrays = {"tokens": tokens.astype(np.int16), "logits": logits(model, tokens)}
        if name in ("tied_2to1", "llama_3to1"):
            tokens = rng.integers(0, model.config.vocab_size, (1, LONG))
            arrays["long_tokens"] = tokens.astype(np.int8)
            arrays["long_positions"] = np.array(LONG_KEPT, np.int16)
            arrays["long_logits"] = logits(model, tokens)[:, LONG_KEPT]
        # Last, as this rounds the rotary frequencies too, for good.
        model.to(torch.bfloat16).save_pretrained(out / name)
        np.savez_compressed(out / name / "golden.npz", **arrays)
    total = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    print(f"{out}: {total / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
