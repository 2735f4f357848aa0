"""Compiled engines over the lookup models, shared between tests: compiling is what takes time.

One vocabulary, one batch shape; tables, prompts, keys and epsilon are free, as in a training run.
"""

import dataclasses
from functools import cache

import jax
import numpy as np

from saki_jax.rollout.batch import Prompts, Rollout
from saki_jax.rollout.engine import make_guided, make_rollout
from saki_jax.rollout.spec import RolloutSpec
from toys import blend, lookup_model, prompts_of, random_table

V, ORDER = 6, 2
ROWS, WIDTH, T = 24, 4, 12
END = 0


def spec(**changes) -> RolloutSpec:
    plain = {"response_length": T, "end_ids": (END,), "pad_id": END, "block_size": 4}
    return RolloutSpec(**plain | changes)


@cache
def guided(**changes):
    """`make_guided` for two lookup models; keyword arguments change the spec."""
    model = lookup_model(V, ORDER)
    return make_guided(model, model, spec(**changes))


@cache
def rollout_fn(**changes):
    """`make_rollout` for two lookup models."""
    model = lookup_model(V, ORDER)
    return make_rollout(model, model, spec(**changes))


def tables(seed: int, weight: float = 0.4) -> tuple[jax.Array, jax.Array]:
    """A student and a teacher that differ."""
    student = random_table(seed, V, ORDER)
    return student, blend(student, random_table(seed + 1, V, ORDER), weight)


def prompts(seed: int, rows: int = ROWS) -> Prompts:
    """Random prompts of every length up to WIDTH, without the end token."""
    rng = np.random.default_rng(seed)
    lengths = 1 + np.arange(rows) % WIDTH
    return prompts_of([rng.integers(1, V, n).tolist() for n in lengths], width=WIDTH)


def assert_same(a: Rollout, b: Rollout, *, but: tuple[str, ...] = (), atol: float = 0.0) -> None:
    """Every field equal: integers and flags exactly, numbers within ``atol``."""
    for field in dataclasses.fields(a):
        if field.name in but:
            continue
        pairs = zip(
            jax.tree.leaves(getattr(a, field.name)),
            jax.tree.leaves(getattr(b, field.name)),
            strict=True,
        )
        for x, y in pairs:
            tolerance = atol if np.issubdtype(x.dtype, np.floating) else 0
            np.testing.assert_allclose(x, y, rtol=0, atol=tolerance, err_msg=field.name)
