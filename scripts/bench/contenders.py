"""The ways to generate that are compared, under one face."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import jax

from bench.scenario import ADAPTIVE, OPTIONS, STUDENT_ONLY, TOKEN_WISE, Pair
from saki_jax.rollout.batch import Prompts, Rollout
from saki_jax.rollout.engine import make_guided
from saki_jax.rollout.external import make_external
from saki_jax.rollout.generate import make_generate
from saki_jax.rollout.keys import Purpose
from saki_jax.rollout.loop import Progress
from saki_jax.rollout.spec import RolloutSpec

# (prompts, epsilon, key, on_progress) -> Rollout
Contender = Callable[[Prompts, float, jax.Array, Callable[[Progress], None] | None], Rollout]

_SIZES = (2, 4, 8, 16)


def wave_costs(sizes: Sequence[int]) -> tuple[float, ...]:
    """What a wave of each block size costs, up to a factor, for a teacher that costs 2.3 students.

    An accelerator reads the weights once whatever K is. On 2 cores a forward over K tokens took
    about 0.7 + 0.28 K times as long as one over a single token, so longer blocks save less.
    """
    if jax.default_backend() == "cpu":
        return tuple(k + 2.3 * (0.7 + 0.28 * k) for k in sizes)
    return tuple(k + 2.3 for k in sizes)


def build(name: str, pair: Pair, spec_for: Callable[[int], RolloutSpec]) -> Contender:
    """The contender of that name.

    ``student_only`` knows no teacher; ``engine_kN`` is the resident engine with blocks of N,
    ``exact_q_adaptive`` the same with blocks that follow the corrections, ``external_kN`` the loop
    driven from Python, ``token_wise`` that loop one token at a time. With ``_compact`` behind the
    name student or engine gathers the last rows into fewer slots, with ``_tN`` the caches are made
    for responses of N tokens, however long these are.

    Args:
      name: one of these.
      pair: models and weights.
      spec_for: block size -> the rollout asked for.

    Raises:
      ValueError: no such contender.
    """
    options = OPTIONS.search(name)
    if options[0]:
        changes = {"compact": 1} if options["compact"] else {}
        if options["length"]:
            changes["response_length"] = int(options["length"])
        plain = name.removesuffix(options[0])
        return build(plain, pair, lambda size: replace(spec_for(size), **changes))
    if name == STUDENT_ONLY:
        generate = make_generate(pair.student, spec_for(8))
        return lambda prompts, epsilon, key, heard: generate(
            pair.student_params, prompts, key, Purpose.DRAFT, heard
        )
    if name == ADAPTIVE:
        spec = replace(spec_for(8), block_sizes=_SIZES, block_costs=wave_costs(_SIZES))
        guided = make_guided(pair.student, pair.teacher, spec)
        return lambda prompts, epsilon, key, heard: guided(
            pair.student_params, pair.teacher_params, prompts, epsilon, key, heard
        )
    match = re.fullmatch(r"(engine|external)_k(\d+)", "external_k1" if name == TOKEN_WISE else name)
    if match is None:
        raise ValueError(
            f"no contender is called {name!r}; there are {STUDENT_ONLY}, {TOKEN_WISE}, {ADAPTIVE}, "
            "engine_kN and external_kN, with N the block size; _compact and _tN may stand behind"
        )
    make = {"engine": make_guided, "external": make_external}[match[1]]
    rollout = make(pair.student, pair.teacher, spec_for(int(match[2])))
    return lambda prompts, epsilon, key, heard: rollout(
        pair.student_params, pair.teacher_params, prompts, epsilon, key, heard
    )
