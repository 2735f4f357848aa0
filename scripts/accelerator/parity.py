"""The numbers of a Qwen3 on the device beside those of a CPU.

In float32 all products are asked for at the highest precision, so that what is left is the order
of sums. In bfloat16 the device computes as it does in training, and is compared with the CPU's
float32: what is left is bfloat16's rounding (a wrong mask or position leaves far more).
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from bench.splits import UNEVEN, UpdateScenario

from accelerator.findings import Check, Finding, Setting
from saki_jax.models.config import Qwen3Config
from saki_jax.models.lm import LanguageModel
from saki_jax.models.qwen3 import init_params, language_model
from saki_jax.rollout.batch import Rollout
from saki_jax.rollout.keys import step_key
from saki_jax.rollout.packing import join
from saki_jax.rollout.score import score_rows
from saki_jax.train.baselines import METHODS
from saki_jax.train.objective import Objective
from saki_jax.train.state import compute_copy, init_state
from saki_jax.train.update import make_update

# Largest error over the largest number. Rounding leaves about 2e-6; TF32 in place of float32, ten
# times the bound.
FLOAT32 = 5e-5
_BUDGET = 800  # slots of a packed pass: four rows a line
_DECODED, _BLOCK = 2, 8  # tokens decoded one by one, and then read as one block
_CACHE = 640  # slots, more than one block of the attention over a cache


class Bench:
    """A model of some head size, a batch for it, and what was computed with them already."""

    def __init__(self, setting: Setting, head_dim: int):
        self.setting = setting
        heads = 256 // head_dim
        self.config = Qwen3Config(
            setting.vocab, 256, 768, setting.layers, heads, heads // 2, head_dim,
            initializer_range=0.1,  # logits as far apart as a trained model's
        )  # fmt: skip
        scenario = UpdateScenario(
            "check", self.config, self.config, rows=6, prompt_length=32, response_length=160,
            mean_length=80, budget=_BUDGET,
        )  # fmt: skip
        with jax.default_device(setting.reference):
            self.params = jax.device_get(init_params(self.config, jax.random.key(1)))
            self.rollout = jax.device_get(scenario.rollout(scenario.splits()[UNEVEN]))
        self._known: dict[tuple, np.ndarray] = {}
        # As if this model had sampled a moment ago, so that the surrogate clips nothing.
        self.rollout = self.rollout.replace(
            log_p=self.get(scores, jnp.float32, setting.reference)
            + np.random.default_rng(2).uniform(-0.05, 0.05, self.rollout.tokens.shape).astype("f")
        )

    def get(self, quantity: Callable, dtype: Any, device: jax.Device) -> np.ndarray:
        """The quantity computed in this type on that device, once."""
        asked = (quantity, jnp.dtype(dtype), device)
        if asked not in self._known:
            exact = jnp.dtype(dtype) == jnp.float32
            precision = jax.default_matmul_precision("highest") if exact else nullcontext()
            with jax.default_device(device), precision:
                params, rollout = jax.device_put((self.params, self.rollout), device)
                model = language_model(self.config, dtype)
                found = jax.device_get(quantity(model, dtype, params, rollout))
            self._known[asked] = np.asarray(found, np.float32)
        return self._known[asked]


def logits(model: LanguageModel, dtype: Any, params: Any, rollout: Rollout) -> jax.Array:
    """Teacher-forced, of whole sequences of one row each, [B, J, V]."""

    @jax.jit
    def run(params, prompts, tokens):
        params = compute_copy(params, dtype)
        return model.logits(params, model.forward(params, join(prompts, tokens), None, None)[0])

    return run(params, rollout.prompts, rollout.tokens)


def scores(model: LanguageModel, dtype: Any, params: Any, rollout: Rollout) -> jax.Array:
    """log p of the response tokens, read in packed lines with segments, [B, T]."""

    @jax.jit
    def run(params, prompts, tokens, length):
        params = compute_copy(params, dtype)
        return score_rows(model, params, prompts, tokens, length, budget=_BUDGET)[0]

    return run(params, rollout.prompts, rollout.tokens, rollout.length)


def gradient(model: LanguageModel, dtype: Any, params: Any, rollout: Rollout) -> jax.Array:
    """Of the update's loss, all parameters one behind the other."""

    def keep(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return jax.tree.map(jnp.zeros_like, grads), grads

    optimizer = optax.GradientTransformation(lambda p: jax.tree.map(jnp.zeros_like, p), keep)
    update = make_update(
        model, METHODS["saki"], Objective(), optimizer,
        tokens_per_micro_batch=_BUDGET, compute_dtype=dtype,
    )  # fmt: skip
    state, stats = update(init_state(params, optimizer), rollout, step_key(0, 1))
    if not stats["applied"]:
        raise RuntimeError(f"the update was not applied; its figures: {jax.device_get(stats)}")
    return jnp.concatenate([x.reshape(-1) for x in jax.tree.leaves(state.opt_state)])


def cached(model: LanguageModel, dtype: Any, params: Any, rollout: Rollout) -> jax.Array:
    """Logits of the last tokens after a prefill: some decoded one by one, then a block."""

    @jax.jit
    def run(params, prompts, tokens):
        params = compute_copy(params, dtype)
        sequence = join(prompts, tokens)
        rows, width = sequence.shape
        cache, done, hidden = model.init_cache(rows, _CACHE), 0, []
        for size in (width - _DECODED - _BLOCK, *[1] * _DECODED, _BLOCK):
            start = jnp.full(rows, done, jnp.int32)
            new, cache = model.forward(params, sequence[:, done : done + size], start, cache)
            hidden.append(new)
            done += size
        return model.logits(params, jnp.concatenate(hidden[1:], axis=1))

    return run(params, rollout.prompts, rollout.tokens)


# With the bound of bfloat16: root mean square of the error over that of the numbers, four times
# what a CPU's bfloat16 leaves. A wrong base of the rotation leaves 1.0, and 0.2 in the second.
QUANTITIES = {
    "teacher-forced logits": (logits, 0.08),
    "log-probabilities in packed lines": (scores, 0.02),
    "gradient of the update": (gradient, 0.16),
    "logits by prefill and decoding": (cached, 0.08),
}


def checks(setting: Setting) -> dict[str, Check]:
    """By name; for each head size, in bfloat16 for the last."""
    found: dict[str, Check] = {}
    for head_dim in setting.head_dims:
        made: list[Bench] = []
        bench = partial(_once, made, setting, head_dim)
        for name, (quantity, bound) in QUANTITIES.items():
            label = f"{name}, head size {head_dim}"
            found[f"{label}, float32"] = partial(_float32, bench, quantity)
            if head_dim == setting.head_dims[-1]:  # rounding asks for no head size
                found[f"{label}, bfloat16"] = partial(_bfloat16, bench, quantity, bound)
        label = f"cache against whole sequence, head size {head_dim}, float32"
        found[label] = partial(_same_device, bench)
    return found


def _once(made: list[Bench], setting: Setting, head_dim: int) -> Bench:
    if not made:
        made.append(Bench(setting, head_dim))
    return made[0]


def _float32(bench: Callable[[], Bench], quantity: Callable) -> Finding:
    b = bench()
    ours, theirs = (
        b.get(quantity, jnp.float32, d) for d in (b.setting.device, b.setting.reference)
    )
    return _largest(ours, theirs)


def _same_device(bench: Callable[[], Bench]) -> Finding:
    """Two ways to one number on the device alone."""
    b = bench()
    whole = b.get(logits, jnp.float32, b.setting.device)[:, -_DECODED - _BLOCK :]
    return _largest(b.get(cached, jnp.float32, b.setting.device), whole)


def _largest(ours: np.ndarray, theirs: np.ndarray) -> Finding:
    error, scale = np.abs(ours - theirs).max(), np.abs(theirs).max()
    return Finding(error / scale, FLOAT32, f"largest error {error:.2g} of {scale:.2g}")


def _bfloat16(bench: Callable[[], Bench], quantity: Callable, bound: float) -> Finding:
    b = bench()
    ours = b.get(quantity, jnp.bfloat16, b.setting.device)
    exact = b.get(quantity, jnp.float32, b.setting.reference)
    error, scale = (float(np.sqrt(np.square(x).mean())) for x in (ours - exact, exact))
    return Finding(error / scale, bound, f"largest error {np.abs(ours - exact).max():.2g}")
