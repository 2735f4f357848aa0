import pytest

from saki_jax.command import nearest
from saki_jax.train.config import ConfigError, default_config, flatten
from saki_jax.train.validate import validate


def valid():
    config = default_config()
    config.student, config.teacher, config.data.path = "a", "b", "c.jsonl"
    return config


def test_the_defaults_are_the_papers_protocol():
    validate(valid())
    flat = flatten(valid())
    expected = {
        "method": "saki",
        "steps": 200,
        "epsilon.start": 0.02,
        "epsilon.zero_at": 51,
        "data.prompts_per_step": 64,
        "data.samples": 8,
        "data.max_prompt_length": 1024,
        "rollout.response_length": 7168,
        "rollout.block_size": 8,
        "optimizer.learning_rate": 1e-6,
        "optimizer.weight_decay": 0.01,
        "optimizer.clip_norm": 1.0,
        "objective.k1_clip": 10.0,
        "objective.ratio_clip": 0.2,
        "objective.dual_clip": 3.0,
        "eval.samples": 8,
        "eval.response_length": 16384,
    }
    assert {name: flat[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("method", "skai", "one of saki, trb.*nearest: saki"),
        ("student", "", "--config.student=FOLDER"),
        ("steps", 0, "at least 1"),
        ("rollout.solver", "secant", "newton, bisect"),
        ("rollout.temperature", 0.6, "must be 1.0"),
        ("rollout.top_p", 0.95, "must be 1.0"),
        ("rollout.top_k", 20, "must be 0"),
        ("rollout.block_size", 0, "rollout.block_size is 0"),
        ("objective.aggregation", "mean", "token_mean"),
        ("optimizer.learning_rate", float("nan"), "at least 0"),
        ("objective.k1_clip", 0.0, "greater than 0"),
        ("epsilon.kind", "lineal", "linear"),
        ("epsilon.start", -1.0, "nats"),
        ("mesh.fsdp", -1, "one of them may be -1"),
        ("mesh.fsdp", 0, "at least 1"),
        ("data.path", "", "--config.data.path"),
    ],
)
def test_what_cannot_be_is_refused_in_words(key, value, words):
    config = valid()
    *groups, leaf = key.split(".")
    node = config
    for group in groups:
        node = node[group]
    node[leaf] = value
    with pytest.raises(ConfigError, match=words):
        validate(config)


def test_r01_a_temperature_other_than_1_is_refused():
    config = valid()
    config.rollout.temperature = 0.6
    with pytest.raises(ConfigError, match="another distribution"):
        validate(config)


def test_a_config_with_other_keys_is_refused():
    config = valid()
    with config.unlocked():
        config.stepz = 3
    with pytest.raises(ConfigError, match=r"no key stepz .* nearest is steps"):
        validate(config)
    config = valid()
    with config.unlocked():
        del config.data["samples"]
    with pytest.raises(ConfigError, match=r"data.samples is missing"):
        validate(config)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("stepz", "steps"),
        ("rollout.blocksize", "rollout.block_size"),
        ("block_size", "rollout.block_size"),
        ("optimizer.lr", None),
        ("optimiser.learning_rate", "optimizer.learning_rate"),
        ("learning_rate", "optimizer.learning_rate"),
        ("eval.sample", "eval.samples"),
        ("xyzzy", None),
    ],
)
def test_the_nearest_key(given, meant):
    assert nearest(given, flatten(default_config())) == meant
