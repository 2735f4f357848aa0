"""The teacher's scoring pass over finished responses, for rollouts that it took no part in."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from saki_jax.models.lm import LanguageModel
from saki_jax.models.token_logprobs import map_positions
from saki_jax.rollout.batch import Prompts, Rollout
from saki_jax.rollout.loop import mesh_context
from saki_jax.rollout.packing import pack, packed_sequences, shape_for
from saki_jax.rollout.spec import RolloutSpec

Score = Callable[[Any, Rollout], Rollout]

_LOGIT_ROWS = 512  # positions whose logits are alive together


def make_score(teacher: LanguageModel, spec: RolloutSpec, mesh: Mesh | None = None) -> Score:
    """Builds ``score(teacher_params, rollout) -> Rollout`` with ``log_t`` and ``teacher_mode``.

    The teacher reads prompts and responses in packed lines, about ``spec.score_tokens`` tokens a
    pass (see `packing`), so the cost follows the tokens that there are. Logits exist for a few
    response positions at a time, never [B, T, V]. A row for which the teacher is not finite at some
    valid position is flagged ``nonfinite``; so may be other rows of its line. The counter of
    teacher forwards during generation stays what it was.
    """
    shards = 1 if mesh is None else mesh.shape["data"] * mesh.shape["fsdp"]

    @jax.jit
    def terms(params: Any, prompts: Prompts, tokens: Array, length: Array) -> tuple[Array, ...]:
        log_t, mode, bad = score_rows(
            teacher, params, prompts, tokens, length, budget=spec.score_tokens, shards=shards
        )
        valid = jnp.arange(tokens.shape[1])[None, :] < length[:, None]
        return log_t, jnp.where(valid, mode, spec.pad_id), bad

    def score(teacher_params: Any, rollout: Rollout) -> Rollout:
        with mesh_context(mesh):
            log_t, teacher_mode, bad = terms(
                teacher_params, rollout.prompts, rollout.tokens, rollout.length
            )
            return rollout.replace(
                log_t=log_t, teacher_mode=teacher_mode, nonfinite=rollout.nonfinite | bad
            )

    return score


def score_rows(
    teacher: LanguageModel,
    params: Any,
    prompts: Prompts,
    tokens: Int[Array, "B T"],
    length: Int[Array, "B"],
    *,
    budget: int,
    shards: int = 1,
) -> tuple[Float[Array, "B T"], Int[Array, "B T"], Bool[Array, "B"]]:
    """log T of each response token, argmax T before it, and whether the row met a bad logit.

    0 behind the end of a response and where a logit is bad.
    """
    longest = prompts.tokens.shape[1] + tokens.shape[1] - 1
    packing = pack(prompts, length, shape_for(len(tokens), longest, budget, shards))
    slots = packing.response_slots(tokens.shape[1])
    valid = jnp.arange(tokens.shape[1])[None, :] < length[:, None]
    lines = (
        *packed_sequences(packing, prompts, tokens),
        packing.spread(tokens, slots),
        packing.spread(valid, slots),
    )

    def one(i: jax.Array, found: tuple[Array, ...]) -> tuple[Array, ...]:
        part = score_lines(teacher, params, *(x[i] for x in lines))
        return jax.tree.map(lambda all_, new: all_.at[i].set(new), found, part)

    kinds = (jnp.float32, jnp.int32, bool)
    nothing = tuple(jnp.zeros(lines[0].shape, kind) for kind in kinds)
    found = jax.lax.fori_loop(0, packing.passes, one, nothing)
    log_t, mode, bad = (packing.collect(x, slots) for x in found)
    return log_t, mode, bad.any(axis=1)


def score_lines(
    teacher: LanguageModel,
    params: Any,
    sequence: Int[Array, "M L"],
    segment: Int[Array, "M L"],
    targets: Int[Array, "M L"],
    wanted: Bool[Array, "M L"],
) -> tuple[Float[Array, "M L"], Int[Array, "M L"], Bool[Array, "M L"]]:
    """One pass: log T(target), argmax T and whether a logit was bad, in each wanted slot."""
    hidden, _ = teacher.forward(params, sequence, None, None, segment)

    def position(part: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        return _terms(teacher.logits(params, part[0]), part[1])

    return map_positions(position, (hidden, targets), wanted, chunk=_LOGIT_ROWS)


def _terms(logits: Float[Array, "*B V"], ids: Int[Array, "*B"]) -> tuple[Array, Array, Array]:
    inside = jnp.clip(ids, 0, logits.shape[-1] - 1)
    chosen = jnp.take_along_axis(logits, inside[..., None], axis=-1)[..., 0]
    bad = ~jnp.isfinite(logits.max(axis=-1))
    log_t = chosen - jax.nn.logsumexp(logits, axis=-1)
    mode = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return jnp.where(bad, 0.0, log_t), jnp.where(bad, 0, mode), bad
