"""One guided wave: draft, verify, bridge, couple (paper 3.3; METHODS section 2)."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from saki_jax.models.lm import LanguageModel
from saki_jax.models.sharding import constrain
from saki_jax.rollout import bridge, coupling
from saki_jax.rollout.keys import Purpose, position_keys, uniform
from saki_jax.rollout.slots import Block, Slots
from saki_jax.rollout.spec import RolloutSpec


def guided_wave(
    student: LanguageModel,
    teacher: LanguageModel,
    spec: RolloutSpec,
    params: tuple[Any, Any],
    caches: tuple[Any, Any],
    slots: Slots,
    key: jax.Array,
    epsilon: Float[Array, ""],
) -> tuple[tuple[Any, Any], Block]:
    """Drafts K tokens from the student and couples each with the bridge q.

    All arrays with a vocabulary live here and die here, as [K, W, V]. The p of the acceptance test,
    of the residual and of the record is one array: the logits from which the proposal was drawn.

    Args:
      student, teacher: the two models, over one vocabulary.
      spec: block size, solver, whether to sample the teacher at corrections.
      params: of student and teacher.
      caches: of student and teacher.
      slots: the rows, before the wave.
      key: the step's key.
      epsilon: the KL budget of each position.

    Returns:
      caches that hold ``pending`` and the first K - 1 proposals, and the block to be committed.
    """
    student_cache, proposal, logits_p = draft(
        student, params[0], caches[0], slots, key, spec.block_size
    )
    teacher_cache, logits_t = verify(teacher, params[1], caches[1], slots, proposal)

    position = slots.count[None, :] + _steps(spec.block_size)
    sequence_id = jnp.broadcast_to(slots.sequence_id[None, :], position.shape)
    solved = bridge.solve(logits_p, logits_t, epsilon, solver=spec.solver)
    log_p, log_t, log_q, x = bridge.token_terms(solved, logits_p, logits_t, proposal)
    v = uniform(position_keys(key, sequence_id, position, Purpose.ACCEPT))
    rejected = coupling.rejects(v, x) & ~solved.nonfinite

    first = jnp.argmax(rejected, axis=0)  # [W]: 0, and unused, where nothing is rejected
    stopped = rejected.any(axis=0)
    correction = correct(
        spec, solved, logits_p, logits_t, proposal, slots, key, first=first, stopped=stopped
    )
    here = (_steps(spec.block_size) == first[None, :]) & stopped[None, :]  # [K, W]

    def at_stop(there: Array, elsewhere: Array) -> Array:
        return jnp.where(here, there[None, :], elsewhere)

    events = {
        "tokens": at_stop(correction.token, proposal),
        "proposal": proposal,
        "corrected": here & correction.found[None, :],
        "log_p": at_stop(correction.log_p, log_p),
        "log_t": at_stop(correction.log_t, log_t),
        "log_q": at_stop(correction.log_q, log_q),
        "accept_prob": coupling.accept_probability(x),
        "beta": solved.beta,
        "kl": solved.kl,
        "tv": at_stop(correction.tv, solved.tv),
        "entropy": solved.entropy,
        "teacher_mode": solved.teacher_mode,
    }
    if spec.teacher_sample:
        nowhere = jnp.full_like(proposal, spec.pad_id)
        sample = jnp.where(correction.found, correction.teacher_sample, spec.pad_id)
        events["teacher_sample"] = at_stop(sample, nowhere)
    block = Block(
        events={name: value.T for name, value in events.items()},  # [K, W] -> [W, K]
        usable=jnp.where(stopped, first + 1, spec.block_size).astype(jnp.int32),
        nonfinite=solved.nonfinite.T,
    )
    return (student_cache, teacher_cache), block


def draft(
    student: LanguageModel,
    params: Any,
    cache: Any,
    slots: Slots,
    key: jax.Array,
    block_size: int,
    purpose: Purpose = Purpose.DRAFT,
) -> tuple[Any, Int[Array, "K W"], Float[Array, "K W V"]]:
    """Draws K tokens one after the other from the student.

    Returns:
      the cache with ``pending`` and the first K - 1 of them, the tokens, and the logits from which
      each was drawn.
    """

    # A scan with the cache as carry: its writes stay in place and the model is compiled once.
    def step(carry, offset):
        cache, token = carry
        hidden, cache = student.forward(params, token[:, None], slots.start + offset, cache)
        logits = student.logits(params, hidden[:, 0])
        keys = position_keys(key, slots.sequence_id, slots.count + offset, purpose)
        token = coupling.draw(logits, keys)
        return (cache, token), (token, logits)

    offsets = jnp.arange(block_size, dtype=jnp.int32)
    (cache, _), (proposal, logits) = jax.lax.scan(step, (cache, slots.pending), offsets)
    return cache, proposal, logits


def verify(
    teacher: LanguageModel, params: Any, cache: Any, slots: Slots, proposal: Int[Array, "K W"]
) -> tuple[Any, Float[Array, "K W V"]]:
    """Teacher logits at the K drafted positions, in one forward over [pending, z_0 .. z_{K-2}]."""
    fed = jnp.concatenate([slots.pending[None, :], proposal[:-1]]).T  # [W, K]
    hidden, cache = teacher.forward(params, constrain(fed, "batch", None), slots.start, cache)
    return cache, teacher.logits(params, hidden.swapaxes(0, 1))


class Correction(NamedTuple):
    """What becomes of the first rejected position of each row; [W] each."""

    token: Array  # drawn from [q - p]+, or the proposal where nothing could be drawn
    found: Array  # bool, whether it was drawn
    log_p: Array  # of the token
    log_t: Array
    log_q: Array
    tv: Array  # mass of the residual
    teacher_sample: Array  # a draw from T; the token where none is asked for


def correct(
    spec: RolloutSpec,
    solved: bridge.Bridge,
    logits_p: Float[Array, "K W V"],
    logits_t: Float[Array, "K W V"],
    proposal: Int[Array, "K W"],
    slots: Slots,
    key: jax.Array,
    *,
    first: Int[Array, "W"],
    stopped: Bool[Array, "W"],
) -> Correction:
    """Draws the correction of each row from [q - p]+ at its first rejected position.

    Only that position's logits are read, and nothing at all while no row has a rejection. Where the
    residual has no mass left after rounding, p and q are equal to float precision: the proposal
    stands, is no correction, and the residual's mass is reported as 0.

    Args:
      spec: whether a teacher sample is wanted.
      solved: the bridges of the block, [K, W].
      logits_p, logits_t, proposal: the block.
      slots: the rows.
      key: the step's key.
      first: first rejected offset of each row, any offset where there is none.
      stopped: rows with a rejection; the others' result is not used.
    """

    def pick(x: Array) -> Array:
        """[K, W, ...] -> [W, ...] at each row's offset."""
        index = first.reshape(1, -1, *(1,) * (x.ndim - 2))
        # Clipped, as the default would fill what lies outside, in a copy of its own.
        return jnp.take_along_axis(x, index, axis=0, mode="clip")[0]

    def keys(purpose: Purpose) -> jax.Array:
        return position_keys(key, slots.sequence_id, slots.count + first, purpose)

    def drawn() -> Correction:
        row, p, t, kept = jax.tree.map(pick, (solved, logits_p, logits_t, proposal))
        token, found = coupling.draw_residual(row, p, t, keys(Purpose.RESIDUAL))
        token = jnp.where(found, token, kept)
        log_p, log_t, log_q, _ = bridge.token_terms(row, p, t, token)
        tv = jnp.where(found, row.tv, 0.0)
        sample = token
        if spec.teacher_sample:
            sample = coupling.draw(t, keys(Purpose.TEACHER_SAMPLE))
        return Correction(token, found, log_p, log_t, log_q, tv, sample)

    def nothing() -> Correction:
        number, token = jnp.zeros(first.shape, jnp.float32), jnp.zeros(first.shape, jnp.int32)
        return Correction(token, stopped, number, number, number, number, token)

    return jax.lax.cond(stopped.any(), drawn, nothing)


def _steps(block_size: int) -> Int[Array, "K 1"]:
    return jnp.arange(block_size, dtype=jnp.int32)[:, None]
