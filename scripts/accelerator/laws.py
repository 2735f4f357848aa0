"""The law of short responses on the device, against the exact one computed on the host.

A tiny Qwen3 pair over four tokens: every history's logits are computed on a CPU, `reference.
sequence_law` enumerates all responses in float64, and the engine's counts are tested by chi-square.
"""

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from accelerator.findings import Check, Finding, Setting
from saki_jax.models.config import Qwen3Config
from saki_jax.models.qwen3 import init_params, language_model
from saki_jax.rollout import reference
from saki_jax.rollout.batch import Prompts, Rollout
from saki_jax.rollout.engine import make_guided
from saki_jax.rollout.generate import make_generate
from saki_jax.rollout.keys import Purpose, step_key
from saki_jax.rollout.spec import RolloutSpec

LEVEL = 1e-4  # a right law fails each test with this probability
REJECTED = 1e-9  # what a wrong law must fall below
_SIGMAS = 5.0  # failure probability 6e-7
_LEAST = 10.0  # cells that expect less are put together
_CONFIG = Qwen3Config(4, 16, 32, 2, 2, 1, 8, initializer_range=0.5)
_PROMPT, _LENGTH, _END = (2, 1), 3, 0
_EPSILON = 0.08


class Laws:
    """The pair, its exact laws, and rollouts on the device."""

    def __init__(self, setting: Setting):
        self.setting = setting
        config = replace(_CONFIG, num_layers=min(_CONFIG.num_layers, setting.layers))
        self.model = language_model(config, jnp.float32)
        with jax.default_device(setting.reference), jax.default_matmul_precision("highest"):
            pair = [init_params(config, jax.random.key(i)) for i in (1, 2)]
            self.logits = [_all_logits(self.model, params) for params in pair]
        self.params = jax.device_put(pair, setting.device)
        self.law = cache(self._law)
        self.rollout = cache(self._rollout)

    def _law(self, epsilon: float) -> dict[tuple[int, ...], float]:
        """Exact; epsilon 0 is the student's own."""
        models = (logits.__getitem__ for logits in self.logits)
        return reference.sequence_law(*models, _PROMPT, epsilon, _LENGTH, (_END,))

    def _rollout(self, epsilon: float, other_schedule: bool = False) -> Rollout:
        rows = self.setting.law_rows
        # Not all rows at once: a TPU pads such small caches to its tiles, a hundred times as large.
        changes = {"block_size": 2, "slots": rows // 10, "compact": 0}
        if other_schedule:
            changes = {
                "block_size": 4, "slots": rows // 20, "refill_rows": 1 + rows // 500,
                "compact": 1 + rows // 100, "solver": "bisect",
            }  # fmt: skip
        spec = RolloutSpec(_LENGTH, (_END,), _END, **changes)
        prompts = Prompts(
            tokens=np.tile(np.array(_PROMPT, np.int32), (rows, 1)),
            length=np.full(rows, len(_PROMPT), np.int32),
            sequence_id=np.arange(rows, dtype=np.int32),
        )
        key = step_key(0, 1)
        with jax.default_device(self.setting.device), jax.default_matmul_precision("highest"):
            if epsilon == 0:
                run = make_generate(self.model, spec)
                return jax.device_get(run(self.params[0], prompts, key, Purpose.DRAFT))
            run = make_guided(self.model, self.model, spec)
            return jax.device_get(run(*self.params, prompts, epsilon, key))


def _all_logits(model: Any, params: Any) -> dict[tuple[int, ...], np.ndarray]:
    """Of every history that can be asked about."""
    histories = [
        (*_PROMPT, *response)
        for length in range(_LENGTH)
        for response in itertools.product(range(_CONFIG.vocab_size), repeat=length)
    ]
    tokens = np.zeros((len(histories), len(_PROMPT) + _LENGTH - 1), np.int32)
    for row, history in zip(tokens, histories, strict=True):
        row[: len(history)] = history
    run = jax.jit(lambda p, ids: model.logits(p, model.forward(p, ids, None, None)[0]))
    last = np.array([len(history) - 1 for history in histories])
    logits = np.asarray(run(params, tokens))[np.arange(len(last)), last]
    return dict(zip(histories, logits, strict=True))


def p_value(rollout: Rollout, law: dict[tuple[int, ...], float]) -> float:
    """Of the responses under the law, by chi-square. KeyError: a response that it excludes."""
    place = {response: i for i, response in enumerate(law)}
    rows, counts = np.unique(
        np.column_stack([rollout.tokens, rollout.length]), axis=0, return_counts=True
    )
    observed = np.zeros(len(law))
    for (*tokens, length), count in zip(rows.tolist(), counts, strict=True):
        observed[place[tuple(tokens[:length])]] += count
    expected = np.array(list(law.values())) * observed.sum()
    small = expected < _LEAST
    groups = [np.append(x[~small], x[small].sum()) for x in (observed, expected)]
    observed, expected = (x[: None if small.any() else -1] for x in groups)
    return float(stats.chi2.sf(((observed - expected) ** 2 / expected).sum(), len(expected) - 1))


def checks(setting: Setting) -> dict[str, Check]:
    """By name. The wrong laws show what the test is able to see."""
    laws = cache(partial(Laws, setting))
    wrong = (0.0, 2 * _EPSILON)
    return {
        "law of the engine: p-value": partial(_right, laws, _EPSILON),
        "law of the engine, other schedule and solver: p-value": partial(
            _right, laws, _EPSILON, other_schedule=True
        ),
        "the same test under wrong laws: largest p-value": partial(_wrong, laws, _EPSILON, wrong),
        "law at epsilon 0: p-value": partial(_right, laws, 0.0),
        "the same test under the bridge's law: p-value": partial(_wrong, laws, 0.0, (_EPSILON,)),
        "corrections against the sum of TV: standard deviations": partial(_corrections, laws),
    }


def _right(laws: Callable[[], Laws], epsilon: float, **schedule: bool) -> Finding:
    here = laws()
    law = here.law(epsilon)
    found = p_value(here.rollout(epsilon, **schedule), law)
    note = f"{here.setting.law_rows} responses, {len(law)} kinds"
    return Finding(found, LEVEL, note, at_least=True)


def _wrong(laws: Callable[[], Laws], epsilon: float, wrong: tuple[float, ...]) -> Finding:
    here = laws()
    found = [p_value(here.rollout(epsilon), here.law(other)) for other in wrong]
    return Finding(max(found), REJECTED, f"the laws of epsilon {', '.join(map(str, wrong))}")


def _corrections(laws: Callable[[], Laws]) -> Finding:
    """Pr(corrected) = TV(p, q) at every position."""
    rollout = laws().rollout(_EPSILON)
    valid = np.arange(_LENGTH)[None, :] < rollout.length[:, None]
    tv, corrected = rollout.tv[valid].astype(float), rollout.corrected[valid]
    away = abs(corrected.sum() - tv.sum()) / np.sqrt((tv * (1 - tv)).sum())
    return Finding(away, _SIGMAS, f"{corrected.sum()} of {valid.sum()} corrected")
