"""Makes the two shipped checkpoints of the addition task: a good teacher and a weak student.

    python scripts/make_addition_models.py --out saki_jax/assets [--only teacher|student]

Both are tiny Qwen3 models trained here from scratch by plain supervised learning on worked
answers. The teacher (99,712 parameters) sees right ones and must reach 95 % at temperature 1. The
student (51,760) sees scratchpads in which 15 % of the columns are wrong, and is stopped by its
accuracy, not by its age: it jumps from useless to useful within a hundred steps. Everything is
seeded. Prints the held-out accuracies: 99.9 % and 16.4 % as shipped. Minutes on two cores.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from saki_jax.data import addition
from saki_jax.data.template import PromptFormat, encode_prompts
from saki_jax.evals.evaluate import evaluate
from saki_jax.evals.graded import Scores
from saki_jax.models import hf
from saki_jax.models import tokenizer as tokenizers
from saki_jax.models.config import Qwen3Config
from saki_jax.models.qwen3 import init_params, language_model
from saki_jax.rollout.generate import make_generate
from saki_jax.rollout.spec import RolloutSpec

SEED = 0
POOL = 65536  # worked answers to learn from
SAMPLES = 8  # responses a problem when a checkpoint is measured
END_ID = addition.TOKENS.index(addition.END_TOKEN)


@dataclass(frozen=True)
class Recipe:
    """One model and how it is taught.

    Attributes:
      config: the model.
      corrupted: share of scratchpad columns with a random sum.
      steps: optimiser steps at most.
      batch: worked answers a step.
      learning_rate: peak, after 100 steps.
      decays: the rate falls to 0 at ``steps`` (cosine) instead of staying.
      accept: Mean@8 range of the finished model.
      stop_at: measure every ``measure_every`` steps and stop at this Mean@8.
    """

    config: Qwen3Config
    corrupted: float
    steps: int
    batch: int
    learning_rate: float
    decays: bool
    accept: tuple[float, float]
    stop_at: float = 2.0
    measure_every: int = 0


def _shape(hidden_size: int, intermediate_size: int) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=len(addition.TOKENS),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_position_embeddings=256,
    )


RECIPES = {
    "teacher": Recipe(
        _shape(64, 192),
        corrupted=0.0,
        steps=1500,
        batch=128,
        learning_rate=3e-3,
        decays=True,
        accept=(0.95, 1.0),
    ),
    "student": Recipe(
        _shape(48, 112),
        corrupted=0.15,
        steps=2000,
        batch=64,
        learning_rate=1e-3,
        decays=False,
        accept=(0.10, 0.22),
        stop_at=0.15,
        measure_every=25,
    ),
}


def worked_answer(a: int, b: int, corrupted: float, rng: np.random.Generator) -> str:
    """A scratchpad with a share of wrong column sums; carries and the result follow from them."""
    text, digits, carry = "", "", 0
    for x, y, _, _ in addition.columns(a, b):
        total = int(rng.integers(0, 20)) if rng.random() < corrupted else x + y + carry
        text += f"{x}+{y}+{carry}={total};"
        digits, carry = str(total % 10) + digits, total // 10
    result = int(f"{carry}{digits}")
    return f"{text}{addition.BOX_OPEN}{result}}}"


def lessons(
    tokenizer: tokenizers.Tokenizer, corrupted: float, batch: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Endless batches of (tokens [B, W], mask [B, W] of the response tokens to be learnt)."""
    rng = np.random.default_rng(SEED)
    width = addition.MAX_PROMPT + addition.MAX_RESPONSE
    tokens = np.full((POOL, width), END_ID, np.int32)
    mask = np.zeros((POOL, width), np.float32)
    for row, (a, b) in enumerate(addition.operands(POOL, held_out=False, seed=SEED).tolist()):
        prompt = tokenizer.encode(addition.problem(a, b).problem)
        answer = [*tokenizer.encode(worked_answer(a, b, corrupted, rng)), END_ID]
        end = len(prompt) + len(answer)
        tokens[row, :end] = prompt + answer
        mask[row, len(prompt) : end] = 1.0
    while True:
        chosen = rng.integers(0, POOL, batch)
        yield tokens[chosen], mask[chosen]


def make_step(config: Qwen3Config, optimizer: optax.GradientTransformation) -> Callable:
    """One jitted step on the mean cross-entropy of the response tokens."""
    model = language_model(config, jnp.float32)

    def loss(params, tokens, mask):
        hidden, _ = model.forward(params, tokens, None, None)
        logits = model.logits(params, hidden[:, :-1])
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return (nll * mask[:, 1:]).sum() / mask[:, 1:].sum()

    @jax.jit
    def step(params, state, tokens, mask):
        value, gradient = jax.value_and_grad(loss)(params, tokens, mask)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def make_measure(
    config: Qwen3Config, tokenizer: tokenizers.Tokenizer, problems: int, seed: int
) -> Callable[[dict], Scores]:
    """Scores of parameters on held-out problems at temperature 1."""
    spec = RolloutSpec(addition.MAX_RESPONSE, (END_ID,), END_ID)
    generate = make_generate(language_model(config, jnp.float32), spec)
    held_out = addition.problems(problems, held_out=True, seed=seed)
    encoded = encode_prompts(
        held_out, tokenizer, PromptFormat("raw", ""), max_length=addition.MAX_PROMPT
    )
    return lambda params: evaluate(generate, params, encoded, tokenizer, samples=SAMPLES, seed=SEED)


def teach(recipe: Recipe, tokenizer: tokenizers.Tokenizer) -> dict:
    """Trained parameters; problems used to decide when to stop are not those of the last word."""
    rate = optax.warmup_cosine_decay_schedule(
        0.0, recipe.learning_rate, 100, recipe.steps, 0.0 if recipe.decays else recipe.learning_rate
    )
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.98, weight_decay=0.01)
    )
    step = make_step(recipe.config, optimizer)
    measure = make_measure(recipe.config, tokenizer, problems=64, seed=1)
    params = init_params(recipe.config, jax.random.key(SEED))
    state = optimizer.init(params)
    batches = lessons(tokenizer, recipe.corrupted, recipe.batch)
    for number in range(1, recipe.steps + 1):
        params, state, loss = step(params, state, *next(batches))
        if number % 250 == 0:
            print(f"  step {number}: loss {float(loss):.4f}", flush=True)
        if recipe.measure_every and number % recipe.measure_every == 0:
            found = measure(params).mean_at_k
            if found >= recipe.stop_at:
                print(f"  stopped after {number} steps at Mean@8 {found:.3f}")
                break
    return params


def save_companions(folder: Path) -> None:
    """The files beside the weights: tokenizer, end ids for config and generation_config."""
    addition.save_tokenizer(folder)
    ids = {"eos_token_id": END_ID, "pad_token_id": END_ID}
    (folder / "config.json").write_text(json.dumps(ids), "utf-8")
    sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    text = json.dumps({**ids, **sampling}, indent=2, sort_keys=True)
    (folder / "generation_config.json").write_text(text + "\n", "utf-8")


def make(name: str, out: Path) -> None:
    """Trains one model, measures it on 512 held-out problems and writes its folder.

    Raises:
      SystemExit: when the accuracy is outside the recipe's range; nothing is written then.
    """
    recipe = RECIPES[name]
    with tempfile.TemporaryDirectory() as companions:
        save_companions(Path(companions))
        tokenizer = tokenizers.load(companions)
        print(f"{name}: training", flush=True)
        params = teach(recipe, tokenizer)
        scores = make_measure(recipe.config, tokenizer, problems=512, seed=2)(params)
        size = sum(leaf.size for leaf in jax.tree.leaves(params))
        print(
            f"{name}: {size:,} parameters, held-out Mean@8 {scores.mean_at_k:.4f}, "
            f"Pass@8 {scores.pass_at_k:.4f}"
        )
        low, high = recipe.accept
        if not low <= scores.mean_at_k <= high:
            raise SystemExit(f"{name}: accuracy outside {low} to {high}; change the recipe")
        folder = hf.save(
            out / f"addition_{name}",
            recipe.config,
            params,
            dtype=jnp.float32,
            tokenizer_from=companions,
        )
        print(f"wrote {folder}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write the models into")
    parser.add_argument("--only", choices=sorted(RECIPES), help="make one of the two")
    args = parser.parse_args()
    for name in [args.only] if args.only else RECIPES:
        make(name, args.out)


if __name__ == "__main__":
    main()
