"""Tokens on the device: the same by every way that leads to them (float32, highest precision).

Two ways add in another order or solve the bridge to another 4e-5 of epsilon, so a draw may tip at a
near tie, about once in 1e5 tokens; the row then goes its own way. Hence one row may differ.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np

from accelerator.findings import Check, Finding, Setting
from saki_jax.models.config import Qwen3Config
from saki_jax.models.qwen3 import init_params, language_model
from saki_jax.rollout.batch import Prompts, Rollout
from saki_jax.rollout.engine import make_guided
from saki_jax.rollout.external import make_external
from saki_jax.rollout.generate import make_generate
from saki_jax.rollout.keys import Purpose, step_key
from saki_jax.rollout.spec import RolloutSpec

ROWS_ASTRAY = 1
_CONFIG = Qwen3Config(512, 128, 256, 2, 4, 2, 32, initializer_range=0.2)
_ENDS = tuple(range(12))  # a response is some 40 tokens long
_WIDTH = 8
_EPSILON = 0.01  # corrects some 5 % of the tokens, whatever the teacher (Pinsker)


class Tokens:
    """One pair of models, and its rollouts by name."""

    def __init__(self, setting: Setting):
        self.setting = setting
        config = replace(_CONFIG, num_layers=min(_CONFIG.num_layers, setting.layers))
        self.model = language_model(config, jnp.float32)
        with jax.default_device(setting.reference):
            pair = [init_params(config, jax.random.key(i)) for i in (1, 2)]
            self.params = jax.device_get(pair)
        rng = np.random.default_rng(5)
        rows = setting.rows
        self.prompts = Prompts(
            tokens=rng.integers(len(_ENDS), 512, (rows, _WIDTH)).astype(np.int32),
            length=(1 + np.arange(rows) % _WIDTH).astype(np.int32),
            sequence_id=np.arange(rows, dtype=np.int32),
        )
        self.get = cache(self._get)
        self.engine = cache(partial(make_guided, self.model, self.model, self._spec(8, rows // 4)))

    def _spec(self, block_size: int, slots: int) -> RolloutSpec:
        return RolloutSpec(
            self.setting.response_length, _ENDS, _ENDS[0],
            block_size=block_size, slots=slots, prefill_buckets=1,
        )  # fmt: skip

    def _get(self, way: str) -> Rollout:
        device = self.setting.reference if way == "cpu" else self.setting.device
        with jax.default_device(device), jax.default_matmul_precision("highest"):
            student, teacher = jax.device_put(self.params, device)
            key, model = step_key(0, 1), self.model
            if way == "generate":
                run = make_generate(model, self._spec(8, self.setting.rows // 4))
                return jax.device_get(run(student, self.prompts, key, Purpose.DRAFT))
            if way == "external":
                run = make_external(model, model, self._spec(8, self.setting.rows // 4))
            elif way == "no refill":
                run = make_guided(model, model, self._spec(3, 0))
            else:
                run = self.engine()
            teacher = student if way == "other teacher" else teacher
            epsilon = 0.0 if way == "epsilon 0" else _EPSILON
            return jax.device_get(run(student, teacher, self.prompts, epsilon, key))


def checks(setting: Setting) -> dict[str, Check]:
    """By name; what is counted is rows whose tokens, lengths or corrections differ."""
    tokens = cache(partial(Tokens, setting))
    pairs = {
        "engine against the external loop": ("engine", "external"),
        "refill and blocks of 8 against neither (blocks of 3)": ("engine", "no refill"),
        "epsilon 0 in the guided program against generation alone": ("epsilon 0", "generate"),
        "engine on the device against the CPU": ("engine", "cpu"),
    }
    found: dict[str, Check] = {
        f"{name}: rows that differ": partial(_differ, tokens, *ways) for name, ways in pairs.items()
    }
    found["another teacher: rows that differ"] = partial(
        _differ, tokens, "engine", "other teacher", at_least=True
    )
    found["corrections in these rollouts"] = partial(_corrected, tokens)
    return found


def _differ(tokens: Callable[[], Tokens], one: str, other: str, at_least: bool = False) -> Finding:
    a, b = (tokens().get(way) for way in (one, other))
    fields = ("tokens", "length", "finished", "corrected")
    unequal = np.zeros(len(a.length), bool)
    for field in fields:
        x, y = (np.asarray(getattr(r, field)).reshape(len(unequal), -1) for r in (a, b))
        unequal |= (x != y).any(axis=1)
    note = f"of {len(unequal)} rows with {int(a.length.sum())} tokens"
    bound = len(unequal) // 4 if at_least else ROWS_ASTRAY
    return Finding(float(unequal.sum()), bound, note, at_least)


def _corrected(tokens: Callable[[], Tokens]) -> Finding:
    rollout = tokens().get("engine")
    share = rollout.corrected.sum() / rollout.length.sum()
    # Fewer would make the equalities above say little.
    return Finding(float(rollout.corrected.sum()), 5, f"{share:.1%} of the tokens", True)
