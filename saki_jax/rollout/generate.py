"""Generation by the student alone: no teacher, no bridge (epsilon 0, method opd, evaluation)."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from saki_jax.models.lm import LanguageModel
from saki_jax.rollout.batch import Prompts, Rollout
from saki_jax.rollout.keys import Purpose
from saki_jax.rollout.loop import Loop, Progress
from saki_jax.rollout.resident import STUDENT_FIELDS
from saki_jax.rollout.slots import Block, Slots
from saki_jax.rollout.spec import RolloutSpec
from saki_jax.rollout.wave import draft

Generate = Callable[..., Rollout]


def make_generate(student: LanguageModel, spec: RolloutSpec, mesh: Mesh | None = None) -> Generate:
    """Builds ``generate(params, prompts, key, purpose, on_progress=None) -> Rollout``.

    The compiled program lives in the result, one for each shape of prompts and each purpose; equal
    arguments give the same result, so that a rollout at epsilon 0 runs the very program of
    generation. (The last few are kept.)

        generate = make_generate(model, RolloutSpec(response_length=64, end_ids=(2,), pad_id=2))
        rollout = generate(params, prompts, step_key(seed, step), Purpose.DRAFT)

    ``generate`` takes the student's parameters, `Prompts` (NumPy or JAX arrays), the step's key, a
    purpose (`Purpose.DRAFT` draws the tokens that the guided engine would draft with this key;
    `Purpose.EVALUATION` touches none of the training randomness) and, optionally, a function that
    is given a `Progress` between jitted calls. It returns a `Rollout` with epsilon 0 and a teacher
    counter of exactly 0, whose ``log_t`` and ``teacher_mode`` are blank until `score` fills them.
    It raises ValueError for empty prompts or repeated sequence ids.
    """
    return _make_generate(student, spec.for_student_only(), mesh)


@functools.lru_cache(maxsize=8)
def _make_generate(student: LanguageModel, spec: RolloutSpec, mesh: Mesh | None) -> Generate:
    @functools.cache
    def loop(purpose: Purpose) -> Loop:
        wave = functools.partial(student_wave, student, purpose)
        return Loop((student,), wave, 1, spec, STUDENT_FIELDS, mesh)

    def generate(
        params: Any,
        prompts: Prompts,
        key: jax.Array,
        purpose: Purpose,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> Rollout:
        return loop(Purpose(purpose))((params,), prompts, key, jnp.float32(0), on_progress)

    return generate


def student_wave(
    student: LanguageModel,
    purpose: Purpose,
    params: tuple[Any],
    caches: tuple[Any],
    slots: Slots,
    key: jax.Array,
    epsilon: Float[Array, ""],
) -> tuple[tuple[Any], Block]:
    """One decode step: a block of one proposal, which nobody tests."""
    del epsilon
    cache, token, logits = draft(student, params[0], caches[0], slots, key, 1, purpose)
    token, logits = token[0], logits[0]
    log_p, entropy, nonfinite = describe_draw(logits, token)
    events = {"tokens": token, "log_p": log_p, "entropy": entropy}
    block = Block(
        events={name: value[:, None] for name, value in events.items()},
        usable=jnp.ones_like(slots.count),
        nonfinite=nonfinite[:, None],
    )
    return (cache,), block


def describe_draw(
    logits: Float[Array, "*B V"], ids: Int[Array, "*B"]
) -> tuple[Float[Array, "*B"], Float[Array, "*B"], Bool[Array, "*B"]]:
    """(log p of the ids, entropy in nats, non-finite flag) of softmax(logits).

    A row with NaN, +inf or nothing but -inf is flagged and reports zeros.
    """
    top = logits.max(axis=-1)  # NaN where any entry is
    nonfinite = ~jnp.isfinite(top)
    top = jnp.where(nonfinite, 0.0, top)
    u = logits - top[..., None]
    weight = jnp.exp(u)
    total = weight.sum(axis=-1)
    log_total = jnp.log(total)
    # An excluded token has u = -inf and adds nothing.
    mean_u = jnp.where(weight > 0, weight * u, 0.0).sum(axis=-1) / total
    chosen = jnp.take_along_axis(u, ids[..., None], axis=-1)[..., 0]
    log_p = jnp.where(nonfinite, 0.0, chosen - log_total)
    return log_p, jnp.where(nonfinite, 0.0, log_total - mean_u), nonfinite
