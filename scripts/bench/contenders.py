"""The ways to generate that are compared, under one face."""

import re
from collections.abc import Callable

import jax

from bench.scenario import STUDENT_ONLY, TOKEN_WISE, Pair
from saki_jax.rollout.batch import Prompts, Rollout
from saki_jax.rollout.engine import make_guided
from saki_jax.rollout.external import make_external
from saki_jax.rollout.generate import make_generate
from saki_jax.rollout.keys import Purpose
from saki_jax.rollout.loop import Progress
from saki_jax.rollout.spec import RolloutSpec

# (prompts, epsilon, key, on_progress) -> Rollout
Contender = Callable[[Prompts, float, jax.Array, Callable[[Progress], None] | None], Rollout]


def build(name: str, pair: Pair, spec_for: Callable[[int], RolloutSpec]) -> Contender:
    """The contender of that name.

    ``student_only`` knows no teacher; ``engine_kN`` is the resident engine with blocks of N,
    ``external_kN`` the loop driven from Python, ``token_wise`` that loop one token at a time.

    Args:
      name: one of these.
      pair: models and weights.
      spec_for: block size -> the rollout asked for.

    Raises:
      ValueError: no such contender.
    """
    if name == STUDENT_ONLY:
        generate = make_generate(pair.student, spec_for(8))
        return lambda prompts, epsilon, key, heard: generate(
            pair.student_params, prompts, key, Purpose.DRAFT, heard
        )
    match = re.fullmatch(r"(engine|external)_k(\d+)", "external_k1" if name == TOKEN_WISE else name)
    if match is None:
        raise ValueError(
            f"no contender is called {name!r}; there are {STUDENT_ONLY}, {TOKEN_WISE}, engine_kN "
            "and external_kN, with N the block size"
        )
    make = {"engine": make_guided, "external": make_external}[match[1]]
    rollout = make(pair.student, pair.teacher, spec_for(int(match[2])))
    return lambda prompts, epsilon, key, heard: rollout(
        pair.student_params, pair.teacher_params, prompts, epsilon, key, heard
    )
