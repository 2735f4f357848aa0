"""A tiny model of the addition task in Hugging Face format, and evaluations of it in seconds."""

import dataclasses
from pathlib import Path

import jax
from ml_collections import ConfigDict

from saki_jax.data import addition
from saki_jax.evals import session
from saki_jax.evals.config import default_config
from saki_jax.models import hf
from saki_jax.models.config import PRESETS
from saki_jax.models.qwen3 import init_params
from saki_jax.rollout.generate import make_generate

TINY = dataclasses.replace(
    PRESETS["tiny"], vocab_size=len(addition.TOKENS) + 2, num_layers=1, initializer_range=0.4
)
"""Two rows of the head more than the tokenizer has, as Qwen3 has 267."""


def save_model(folder: Path, seed: int = 0) -> Path:
    """A folder with random weights and the tokenizer of the addition task."""
    tokenizer = folder.parent / f"{folder.name}-tokenizer"
    addition.save_tokenizer(tokenizer)
    params = init_params(TINY, jax.random.key(seed))
    return hf.save(folder, TINY, params, dtype="float32", tokenizer_from=tokenizer)


_COMPILED: dict = {}


def make_once(model, spec, mesh):
    """`make_generate`, compiled once for all tests: `TINY` models are the same function."""
    if (spec, mesh) not in _COMPILED:
        _COMPILED[spec, mesh] = make_generate(model, spec, mesh)
    return _COMPILED[spec, mesh]


def evaluate(config: ConfigDict, folder: Path, make=make_once) -> dict:
    """`session.run` without compiling again."""
    return session.run(config, folder, make=make)


def small_config(checkpoint: Path, /, **changes) -> ConfigDict:
    """An evaluation of 5 addition problems x 4 samples x up to 12 tokens, 6 rows a batch."""
    config = default_config()
    config.checkpoint = str(checkpoint)
    config.template, config.instruction = "raw", ""
    config.sets.addition = 5
    config.samples, config.max_new_tokens = 4, 12
    config.batch_rows, config.slots = 6, 4
    config.mesh.data = 1
    config.resamples = 200
    config.grader = "exact"
    config.update_from_flattened_dict(changes)
    return config
