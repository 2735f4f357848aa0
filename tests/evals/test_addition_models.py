"""The shipped checkpoints of the addition task are what the quickstart says of them."""

from pathlib import Path

import jax
import pytest

import saki_jax
from saki_jax.data import addition
from saki_jax.data.template import PromptFormat, encode_prompts
from saki_jax.evals.evaluate import evaluate
from saki_jax.models import hf
from saki_jax.models import tokenizer as tokenizers
from saki_jax.models.qwen3 import language_model
from saki_jax.rollout.generate import make_generate
from saki_jax.rollout.spec import RolloutSpec

ASSETS = Path(saki_jax.__file__).parent / "assets"


def test_the_assets_are_small():
    files = [f for f in ASSETS.rglob("*") if f.is_file()]
    assert {f.parent.name for f in files} == {"addition_teacher", "addition_student"}
    assert sum(f.stat().st_size for f in files) < 1_000_000


@pytest.mark.parametrize(
    ("name", "parameters", "low", "high"),
    [("teacher", 99712, 0.95, 1.0), ("student", 51760, 0.08, 0.25)],
)
def test_accuracy_at_temperature_one(name, parameters, low, high):
    """256 samples of models of 99.9 and 16.4 %: three standard errors inside the limits."""
    folder = ASSETS / f"addition_{name}"
    config, params = hf.load(folder)
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == parameters
    tokenizer = tokenizers.load(folder)
    end_ids = tokenizers.end_ids([folder])
    assert end_ids == (tokenizer.pad_id,)  # pad is the end token, as in Qwen3
    spec = RolloutSpec(addition.MAX_RESPONSE, end_ids, tokenizer.pad_id)
    problems = addition.problems(128, held_out=True, seed=3)
    encoded = encode_prompts(
        problems, tokenizer, PromptFormat("raw", ""), max_length=addition.MAX_PROMPT
    )
    generate = make_generate(language_model(config), spec)
    scores = evaluate(generate, params, encoded, tokenizer, samples=2, seed=0)
    assert low <= scores.mean_at_k <= high
    assert scores.unknown_ids == scores.nonfinite == 0
