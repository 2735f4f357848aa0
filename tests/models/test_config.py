"""config.json as published and as transformers 5 writes it; refusing what is not computed."""

import json
import math

import pytest
import transformers

from saki_jax.models.config import PRESETS, ConfigError, Qwen3Config
from saki_jax.models.parameters import describe

PUBLISHED = {  # Qwen3-0.6B-Base as on the hub
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
WITHOUT_THETA = {k: v for k, v in PUBLISHED.items() if k not in ("rope_theta", "rope_scaling")}
NESTED = WITHOUT_THETA | {"rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}}


def test_a_published_file_is_the_preset():
    assert Qwen3Config.from_hf(PUBLISHED) == PRESETS["0.6b"]


def test_q04_theta_from_either_place_raw_or_through_transformers():
    sources = [PUBLISHED, NESTED]
    sources += [transformers.Qwen3Config(**raw) for raw in sources]
    assert not hasattr(sources[-1], "rope_theta")  # what the naive port reads as 1e4
    assert [Qwen3Config.from_hf(source).rope_theta for source in sources] == [1e6] * 4


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, "rope_theta is missing"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_theta is missing"),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "yarn"}}, "rope type 'yarn'"),
        ({"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2}}, "'linear'"),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}, "different values"),
        ({"rope_theta": 1e6, "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_q04_anything_else_raises_instead_of_falling_back(change, words):
    with pytest.raises(ConfigError, match=words):
        Qwen3Config.from_hf(WITHOUT_THETA | change)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "gemma3"}, "model_type 'gemma3' is not known"),
        ({"model_type": None}, "model_type None is not known"),
        ({"architectures": ["Qwen3ForSequenceClassification"]}, "not a language model of type"),
        ({"attention_bias": True}, "attention_bias is true"),
        ({"mlp_bias": True}, "mlp_bias is true"),
        ({"use_sliding_window": True, "sliding_window": 4096}, "use_sliding_window is true"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "'sliding_attention'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"head_dim": None}, "head_dim is missing"),
        ({"vocab_size": "151936"}, "vocab_size must be a positive whole number, got '151936'"),
        ({"hidden_size": 0}, "hidden_size must be a positive whole number"),
        ({"num_key_value_heads": 3}, "16 query heads cannot share 3"),
        ({"head_dim": 7}, "head_dim must be even"),
    ],
)
def test_what_is_not_computed_is_refused_in_words(change, words):
    with pytest.raises(ConfigError, match=words):
        Qwen3Config.from_hf(PUBLISHED | change)


def test_all_problems_stand_in_one_message():
    broken = PUBLISHED | {"attention_bias": True, "rope_theta": None, "head_dim": None}
    with pytest.raises(ConfigError) as caught:
        Qwen3Config.from_hf(broken, where="DIR/config.json")
    assert len(caught.value.problems) == 3
    assert "DIR/config.json" in str(caught.value)


def test_a_window_that_is_switched_off_is_no_window():
    assert Qwen3Config.from_hf(PUBLISHED | {"sliding_window": 4096}) == PRESETS["0.6b"]


def test_llama_has_no_q_norm_and_may_leave_the_head_dim_out():
    raw = {
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "num_hidden_layers": 30,
        "vocab_size": 49152,
        "rope_theta": 100000,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
    config = Qwen3Config.from_hf(raw)
    assert (config.head_dim, config.qk_norm, config.rms_norm_eps) == (64, False, 1e-5)
    total = sum(math.prod(p.shape) for p in describe(config))
    assert total == 134_515_008
    assert not any("q_norm" in p.hf_name for p in describe(config))


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_out_and_back(name):
    config = PRESETS[name]
    raw = json.loads(json.dumps(config.to_hf()))
    assert Qwen3Config.from_hf(raw) == config
    assert Qwen3Config.from_hf(transformers.Qwen3Config(**raw)) == config


def test_llama_out_and_back():
    config = Qwen3Config(64, 32, 48, 2, 4, 2, 8, qk_norm=False, rope_theta=1e5)
    assert Qwen3Config.from_hf(config.to_hf()) == config
    assert Qwen3Config.from_hf(transformers.LlamaConfig(**config.to_hf())) == config


def test_q03_torch_layout_shapes_of_the_0_6b_model():
    shapes = {p.hf_name: p.hf_shape for p in describe(PRESETS["0.6b"])}
    attention = "model.layers.0.self_attn."
    assert shapes[attention + "q_proj.weight"] == (2048, 1024)
    assert shapes[attention + "k_proj.weight"] == (1024, 1024)
    assert shapes[attention + "v_proj.weight"] == (1024, 1024)
    assert shapes[attention + "o_proj.weight"] == (1024, 2048)
    assert shapes[attention + "q_norm.weight"] == (128,)
    assert shapes[attention + "k_norm.weight"] == (128,)


@pytest.mark.parametrize(("name", "millions"), [("0.6b", 596.0), ("1.7b", 1720.6), ("4b", 4022.5)])
def test_parameter_counts(name, millions):

    total = sum(math.prod(p.shape) for p in describe(PRESETS[name]))
    assert total / 1e6 == pytest.approx(millions, abs=0.05)
