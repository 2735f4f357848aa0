"""Interleaved generation of SKD: the student drafts, the teacher replaces what it would not say.

A drafted token stands if it is among the teacher's `top_k` most probable tokens at its own prefix;
the first one that is not gives way to a draw from the teacher, and what was drafted behind it is
dropped. No bridge and no epsilon take part. The law of one token y, with S the teacher's top k:

    p(y) [y in S] + p(not S) T(y)
"""

import functools
import logging
from collections.abc import Callable
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from saki_jax.models.lm import LanguageModel
from saki_jax.rollout import coupling
from saki_jax.rollout.batch import Prompts, Rollout
from saki_jax.rollout.engine import RolloutFn
from saki_jax.rollout.generate import describe_draw
from saki_jax.rollout.keys import Purpose, position_keys
from saki_jax.rollout.loop import Loop, Progress
from saki_jax.rollout.resident import GUIDED_FIELDS
from saki_jax.rollout.slots import Block, Slots
from saki_jax.rollout.spec import RolloutSpec
from saki_jax.rollout.wave import draft, verify

log = logging.getLogger(__name__)

_EVENTS = ("tokens", "proposal", "corrected", "log_p", "log_t", "entropy", "teacher_mode")


def make_skd(
    student: LanguageModel,
    teacher: LanguageModel,
    spec: RolloutSpec,
    *,
    top_k: int,
    mesh: Mesh | None = None,
) -> RolloutFn:
    """Builds a rollout that is called as the result of `engine.make_rollout`.

    ``rollout(student_params, teacher_params, prompts, epsilon, key, on_progress=None) -> Rollout``

    ``epsilon`` is not looked at and recorded as 0; `corrected` marks the replaced tokens; the
    quantities of a bridge (``beta``, ``tv``, ``kl``, ``log_q``, ``accept_prob``) are blank. As in
    the guided engine the block size changes the cost and never the tokens.

    Raises:
      ValueError: the models have different vocabularies, or `top_k` is below 1.
    """
    if student.vocab_size != teacher.vocab_size:
        raise ValueError(
            f"the student has {student.vocab_size} logits and the teacher {teacher.vocab_size}; "
            "the teacher can judge a drafted token only in its own vocabulary"
        )
    if top_k < 1:
        raise ValueError(f"top_k is {top_k}; the teacher must let at least 1 token stand")
    if top_k >= teacher.vocab_size:
        log.warning(
            "skd.top_k is %d and the vocabulary has %d tokens: the teacher lets every draft stand, "
            "so the student generates alone",
            top_k,
            teacher.vocab_size,
        )
    fields = {name: GUIDED_FIELDS[name] for name in _EVENTS}
    wave = functools.partial(skd_wave, student, teacher, spec.block_size, top_k)
    loop = Loop((student, teacher), wave, spec.block_size, spec, fields, mesh)

    def rollout(
        student_params: Any,
        teacher_params: Any,
        prompts: Prompts,
        epsilon: Real | Float[Array, ""],
        key: jax.Array,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> Rollout:
        del epsilon
        return loop((student_params, teacher_params), prompts, key, jnp.float32(0), on_progress)

    return rollout


def skd_wave(
    student: LanguageModel,
    teacher: LanguageModel,
    block_size: int,
    top_k: int,
    params: tuple[Any, Any],
    caches: tuple[Any, Any],
    slots: Slots,
    key: jax.Array,
    epsilon: Float[Array, ""],
) -> tuple[tuple[Any, Any], Block]:
    """Drafts K tokens and offers them up to and with the first that the teacher replaces.

    A fully accepted block offers exactly its K tokens, none beside.
    """
    del epsilon
    student_cache, proposal, logits_p = draft(student, params[0], caches[0], slots, key, block_size)
    teacher_cache, logits_t = verify(teacher, params[1], caches[1], slots, proposal)
    rejected = ~among_top(logits_t, proposal, top_k)

    first = jnp.argmax(rejected, axis=0)  # [W]: 0, and unused, where nothing is rejected
    stopped = rejected.any(axis=0)
    # Clipped, as the default would fill what lies outside, in a copy of its own.
    there = jnp.take_along_axis(logits_t, first[None, :, None], axis=0, mode="clip")[0]  # [W, V]
    keys = position_keys(key, slots.sequence_id, slots.count + first, Purpose.TEACHER_SAMPLE)
    replacement = jax.lax.cond(
        stopped.any(),
        lambda: coupling.draw(there, keys),
        lambda: jnp.zeros_like(slots.pending),
    )
    offset = jnp.arange(block_size, dtype=jnp.int32)[:, None]
    replaced = (offset == first[None, :]) & stopped[None, :]  # [K, W]
    token = jnp.where(replaced, replacement[None, :], proposal)

    log_p, entropy, student_nonfinite = describe_draw(logits_p, token)
    log_t, _, teacher_nonfinite = describe_draw(logits_t, token)
    events = {
        "tokens": token,
        "proposal": proposal,
        "corrected": replaced,
        "log_p": log_p,
        "log_t": log_t,
        "entropy": entropy,
        "teacher_mode": jnp.argmax(logits_t, axis=-1).astype(jnp.int32),
    }
    block = Block(
        events={name: value.T for name, value in events.items()},  # [K, W] -> [W, K]
        usable=jnp.where(stopped, first + 1, block_size).astype(jnp.int32),
        nonfinite=(student_nonfinite | teacher_nonfinite).T,
    )
    return (student_cache, teacher_cache), block


def among_top(logits: Float[Array, "*B V"], ids: Int[Array, "*B"], top_k: int) -> Bool[Array, "*B"]:
    """Whether fewer than `top_k` logits are strictly greater than that of the id.

    Among equals at the last rank all stand: the teacher does not prefer one of them.
    """
    chosen = jnp.take_along_axis(logits, ids[..., None], axis=-1)
    return (logits > chosen).sum(axis=-1) < top_k
