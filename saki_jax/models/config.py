"""What a Qwen3 is made of, read from and written to Hugging Face's config.json."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}


class ConfigError(ValueError):
    """A model configuration that this package cannot run; ``problems`` lists why."""

    def __init__(self, where: str, problems: list[str]):
        super().__init__(f"{where} cannot be used:\n" + "\n".join(f"- {p}" for p in problems))
        self.problems = problems


@dataclass(frozen=True)
class Qwen3Config:
    """Shapes and constants of a Qwen3 model, or of a Llama one (``qk_norm=False``).

    Attributes:
      vocab_size: V, rows of the embedding and of the head (often more than the tokenizer has).
      hidden_size: D.
      intermediate_size: width of the SwiGLU layer.
      num_layers: L.
      num_heads: H, query heads.
      num_kv_heads: G, key/value heads; each serves H / G neighbouring query heads.
      head_dim: C. Its own number: Qwen3 has C = 128 where D / H is 64.
      rope_theta: base of the rotary frequencies.
      rms_norm_eps: added to the mean square in every RMSNorm.
      tie_word_embeddings: the head is the embedding, one array for both.
      qk_norm: RMSNorm on each query and key head before the rotation (Qwen3), or none (Llama).
      max_position_embeddings: the longest sequence that the checkpoint was made for.
      initializer_range: standard deviation of freshly drawn weights.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 1e6
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = True
    qk_norm: bool = True
    max_position_embeddings: int = 32768
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        problems = []
        if self.num_heads % self.num_kv_heads:
            problems.append(
                f"{self.num_heads} query heads cannot share {self.num_kv_heads} key/value heads "
                "evenly; make the first a multiple of the second"
            )
        if self.head_dim % 2:
            problems.append(f"head_dim must be even for the rotation, got {self.head_dim}")
        if problems:
            raise ConfigError("the model configuration", problems)

    @classmethod
    def from_hf(cls, source: Any, where: str = "config.json") -> "Qwen3Config":
        """Reads a parsed config.json or a transformers configuration object.

        Args:
          source: a mapping, or an object with ``to_dict`` (transformers' Qwen3Config).
          where: the file's name for error messages.

        Raises:
          ConfigError: an architecture, a rope type, biases or a sliding window that this module
            does not compute, or a missing number; all problems stand in one message.
        """
        raw = source if isinstance(source, Mapping) else source.to_dict()
        problems: list[str] = []
        model_type = raw.get("model_type")
        named = raw.get("architectures")
        if model_type not in ARCHITECTURES:
            problems.append(
                f"model_type {model_type!r} is not known (architectures: {named}); "
                f"choose a checkpoint of type {' or '.join(ARCHITECTURES)}"
            )
        elif named and ARCHITECTURES[model_type] not in named:
            problems.append(
                f"architectures is {named}, not a language model of type {model_type!r}; "
                f"choose a checkpoint of {ARCHITECTURES[model_type]}"
            )
        problems += _unsupported(raw)
        theta = _rope_theta(raw, problems)
        numbers = {name: _count(raw, key, problems) for name, key in _COUNTS.items()}
        # Llama files may leave these two out; for Qwen3 there is no right guess.
        llama = model_type == "llama"
        numbers["num_kv_heads"] = _count(
            raw, "num_key_value_heads", problems, numbers["num_heads"] if llama else None
        )
        derived = numbers["hidden_size"] // numbers["num_heads"] if llama else None
        numbers["head_dim"] = _count(raw, "head_dim", problems, derived)
        if problems:
            raise ConfigError(where, problems)
        return cls(
            **numbers,
            rope_theta=theta,
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            qk_norm=not llama,
            max_position_embeddings=int(raw.get("max_position_embeddings", 32768)),
            initializer_range=float(raw.get("initializer_range", 0.02)),
        )

    def to_hf(self) -> dict[str, Any]:
        """config.json's content: read by transformers 4 (top-level theta) and 5 (nested) alike."""
        model_type = "qwen3" if self.qk_norm else "llama"
        return {
            "architectures": [ARCHITECTURES[model_type]],
            "model_type": model_type,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "initializer_range": self.initializer_range,
            "intermediate_size": self.intermediate_size,
            "max_position_embeddings": self.max_position_embeddings,
            "num_attention_heads": self.num_heads,
            "num_hidden_layers": self.num_layers,
            "num_key_value_heads": self.num_kv_heads,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_parameters": {"rope_theta": self.rope_theta, "rope_type": "default"},
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": self.tie_word_embeddings,
            "use_cache": True,
            "vocab_size": self.vocab_size,
        }


_COUNTS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
}


def _count(raw: Mapping, key: str, problems: list[str], default: int | None = None) -> int:
    """A positive whole number of the config; 1 stands in after a noted problem."""
    value = raw.get(key)
    if value is None:
        value = default
    if value is None:
        problems.append(f"{key} is missing")
        return 1
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        problems.append(f"{key} must be a positive whole number, got {value!r}")
        return 1
    return value


def _rope_theta(raw: Mapping, problems: list[str]) -> float:
    """theta from ``rope_parameters`` (transformers 5) or the top level (published files).

    There is no default: 1e4 in place of 1e6 goes unseen on short prompts and ruins long ones.
    """
    nested = raw.get("rope_parameters") or {}
    scaling = raw.get("rope_scaling") or {}
    for name, table in (("rope_parameters", nested), ("rope_scaling", scaling)):
        kind = table.get("rope_type", table.get("type", "default"))
        if kind != "default":
            problems.append(
                f"{name} asks for rope type {kind!r}; choose a checkpoint of type 'default'"
            )
        if table.get("partial_rotary_factor", 1.0) != 1.0:
            problems.append(
                f"{name} rotates a part of each head; choose one that rotates all of it"
            )
    found = {
        float(table["rope_theta"])
        for table in (raw, nested, scaling)
        if table.get("rope_theta") is not None
    }
    if not found:
        problems.append(
            "rope_theta is missing, both at the top level and in rope_parameters; "
            "add the checkpoint's own value (Qwen3: 1000000)"
        )
        return 1.0
    if len(found) > 1:
        problems.append(f"rope_theta is given more than once with different values {sorted(found)}")
    return found.pop()


def _unsupported(raw: Mapping) -> list[str]:
    """Settings that would change the function computed, in words."""
    problems = []
    for key in ("attention_bias", "mlp_bias"):
        if raw.get(key):
            problems.append(f"{key} is true; choose a checkpoint whose projections have no bias")
    # Qwen3 files carry a window size that use_sliding_window=false switches off.
    if raw.get("use_sliding_window"):
        problems.append("use_sliding_window is true; choose a checkpoint with full attention")
    others = sorted(set(raw.get("layer_types") or ()) - {"full_attention"})
    if others:
        problems.append(f"layer_types contains {others}; choose one of 'full_attention' only")
    if raw.get("hidden_act", "silu") != "silu":
        problems.append(f"hidden_act is {raw['hidden_act']!r}; choose a checkpoint with 'silu'")
    if raw.get("partial_rotary_factor", 1.0) != 1.0:
        problems.append("partial_rotary_factor is not 1; choose one whose heads are rotated whole")
    if raw.get("quantization_config"):
        problems.append("quantization_config is set; give unquantised weights (bf16, f16 or f32)")
    return problems


def _qwen3(layers: int, hidden: int, feed_forward: int, heads: int) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=151936,
        hidden_size=hidden,
        intermediate_size=feed_forward,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=128,
    )


PRESETS = {
    "0.6b": _qwen3(28, 1024, 3072, 16),
    "1.7b": _qwen3(28, 2048, 6144, 16),
    "4b": _qwen3(36, 2560, 9728, 32),
    "tiny": Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
    ),
}
