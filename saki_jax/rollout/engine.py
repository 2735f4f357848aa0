"""The exact-q engine: student and teacher in one resident loop (paper 3.3)."""

import functools
from collections.abc import Callable
from dataclasses import replace
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float

from saki_jax.models.lm import LanguageModel
from saki_jax.rollout.advance import Wave
from saki_jax.rollout.batch import Prompts, Rollout
from saki_jax.rollout.generate import make_generate
from saki_jax.rollout.keys import Purpose
from saki_jax.rollout.loop import Loop, Progress
from saki_jax.rollout.resident import GUIDED_FIELDS
from saki_jax.rollout.score import make_score
from saki_jax.rollout.spec import RolloutSpec
from saki_jax.rollout.wave import guided_wave

RolloutFn = Callable[..., Rollout]


def make_rollout(
    student: LanguageModel, teacher: LanguageModel, spec: RolloutSpec, mesh: Mesh | None = None
) -> RolloutFn:
    """Builds the rollout of a training step.

    ``rollout(student_params, teacher_params, prompts, epsilon, key, on_progress=None) -> Rollout``

    Call it once and keep the result: the compiled programs live in it, one guided and one for the
    student alone, for each shape of prompts, however epsilon changes.

        rollout_fn = make_rollout(student, teacher, spec)
        rollout = rollout_fn(student_params, teacher_params, prompts, 0.02, step_key(seed, step))

    Where ``epsilon`` (a Python number) is exactly 0, q is p: the student generates alone, with the
    tokens that the guided program would give, the teacher's counter stays 0, and one scoring pass
    fills ``log_t`` and ``teacher_mode`` afterwards. Methods that never guide (opd) pass 0.
    ``on_progress`` is given a `Progress` on the host, between jitted calls.

    Raises (at the call): ValueError for a negative or NaN epsilon, for empty prompts, for repeated
    sequence ids.
    """
    guided = make_guided(student, teacher, spec, mesh)
    generate = make_generate(student, spec, mesh)
    score = make_score(teacher, spec, mesh)

    def rollout(
        student_params: Any,
        teacher_params: Any,
        prompts: Prompts,
        epsilon: Real | Float[Array, ""],
        key: jax.Array,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> Rollout:
        if not float(epsilon) >= 0:
            raise ValueError(f"epsilon is a KL budget and must be at least 0, got {epsilon}")
        if float(epsilon) == 0:
            alone = generate(student_params, prompts, key, Purpose.DRAFT, on_progress)
            return score(teacher_params, alone)
        return guided(student_params, teacher_params, prompts, epsilon, key, on_progress)

    return rollout


def make_guided(
    student: LanguageModel, teacher: LanguageModel, spec: RolloutSpec, mesh: Mesh | None = None
) -> RolloutFn:
    """The guided program alone, whatever epsilon is; called as the result of `make_rollout`.

    Raises:
      ValueError: the models have different vocabularies.
    """
    if student.vocab_size != teacher.vocab_size:
        raise ValueError(
            f"the student has {student.vocab_size} logits and the teacher {teacher.vocab_size}; "
            "the bridge between them needs one vocabulary. Use models of one family"
        )
    fields = {
        name: dtype
        for name, dtype in GUIDED_FIELDS.items()
        if name != "teacher_sample" or spec.teacher_sample
    }

    def wave(block_size: int) -> Wave:
        return functools.partial(
            guided_wave, student, teacher, replace(spec, block_size=block_size)
        )

    others = {size: wave(size) for size in spec.block_sizes}
    models = (student, teacher)
    loop = Loop(models, wave(spec.block_size), spec.block_size, spec, fields, mesh, others)

    def guided(
        student_params: Any,
        teacher_params: Any,
        prompts: Prompts,
        epsilon: Real | Float[Array, ""],
        key: jax.Array,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> Rollout:
        # A Python number would be another compiled program than an array.
        epsilon = jnp.asarray(epsilon, jnp.float32)
        return loop((student_params, teacher_params), prompts, key, epsilon, on_progress)

    return guided
