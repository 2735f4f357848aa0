"""The teacher's scoring pass over finished responses, for rollouts that it took no part in."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from saki_jax.models.lm import LanguageModel
from saki_jax.models.sharding import constrain
from saki_jax.rollout.batch import Prompts, Rollout
from saki_jax.rollout.loop import mesh_context
from saki_jax.rollout.spec import RolloutSpec

Score = Callable[[Any, Rollout], Rollout]

_LOGIT_ROWS = 512  # (row, position) pairs whose logits are alive together


def make_score(teacher: LanguageModel, spec: RolloutSpec, mesh: Mesh | None = None) -> Score:
    """Builds ``score(teacher_params, rollout) -> Rollout`` with ``log_t`` and ``teacher_mode``.

    One forward of the teacher over prompts and responses, in chunks of rows of about
    ``spec.score_tokens`` tokens, with the logits of a few positions at a time, never [B, T, V].
    A row for which the teacher is not finite at some valid position is flagged ``nonfinite``. The
    counter of teacher forwards during generation stays what it was.
    """
    shards = 1 if mesh is None else mesh.shape["data"] * mesh.shape["fsdp"]

    @jax.jit
    def terms(params: Any, prompts: Prompts, tokens: Array, valid: Array) -> tuple[Array, ...]:
        rows, response_length = tokens.shape
        width = prompts.tokens.shape[1] + response_length
        chunk = min(-(-max(spec.score_tokens // width, 1) // shards) * shards, rows)
        if chunk == rows:
            return score_rows(teacher, params, prompts, tokens, valid, spec.pad_id)
        steps = -(-rows // chunk)

        def split(x: Array) -> Array:
            x = jnp.pad(x, [(0, steps * chunk - rows), *[(0, 0)] * (x.ndim - 1)])
            return x.reshape(steps, chunk, *x.shape[1:])

        parts = jax.tree.map(split, (prompts, tokens, valid))
        result = jax.lax.map(lambda part: score_rows(teacher, params, *part, spec.pad_id), parts)
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:rows], result)

    def score(teacher_params: Any, rollout: Rollout) -> Rollout:
        with mesh_context(mesh):
            log_t, teacher_mode, bad = terms(
                teacher_params, rollout.prompts, rollout.tokens, rollout.valid
            )
            return rollout.replace(
                log_t=log_t, teacher_mode=teacher_mode, nonfinite=rollout.nonfinite | bad
            )

    return score


def score_rows(
    teacher: LanguageModel,
    params: Any,
    prompts: Prompts,
    tokens: Int[Array, "R T"],
    valid: Bool[Array, "R T"],
    pad_id: int,
) -> tuple[Float[Array, "R T"], Int[Array, "R T"], Bool[Array, "R"]]:
    """log T of each response token, argmax T before it, and whether the row met a bad logit."""
    sequence = constrain(join(prompts, tokens), "batch", None)
    hidden, _ = teacher.forward(params, sequence, None, None)
    # Position t of a response is predicted at the slot of the token before it.
    before = jnp.maximum(prompts.length, 1)[:, None] - 1 + jnp.arange(tokens.shape[1])[None, :]
    hidden = jnp.take_along_axis(hidden, before[:, :, None], axis=1)

    def one(position: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        hidden, ids = position  # [R, D], [R]
        logits = teacher.logits(params, hidden)
        inside = jnp.clip(ids, 0, logits.shape[-1] - 1)
        chosen = jnp.take_along_axis(logits, inside[:, None], axis=-1)[:, 0]
        bad = ~jnp.isfinite(logits.max(axis=-1))
        log_t = chosen - jax.nn.logsumexp(logits, axis=-1)
        return log_t, jnp.argmax(logits, axis=-1).astype(jnp.int32), bad

    # Slices of time, all rows at once: rows may lie on different devices.
    at_once = max(_LOGIT_ROWS // tokens.shape[0], 1)
    by_time = jax.lax.map(one, (hidden.swapaxes(0, 1), tokens.T), batch_size=at_once)
    log_t, mode, bad = (x.T for x in by_time)
    good = valid & ~bad
    return jnp.where(good, log_t, 0.0), jnp.where(good, mode, pad_id), (valid & bad).any(axis=1)


def join(prompts: Prompts, tokens: Int[Array, "R T"]) -> Int[Array, "R J"]:
    """Prompt and response of each row without a gap, right-padded with anything; J = P + T - 1.

    The last response token is left out where it would stand in column P + T - 1: nothing follows.
    """
    width = prompts.tokens.shape[1] + tokens.shape[1] - 1
    column = jnp.arange(width)[None, :]
    padded = jnp.pad(prompts.tokens, ((0, 0), (0, tokens.shape[1] - 1)))
    offset = jnp.clip(column - prompts.length[:, None], 0, tokens.shape[1] - 1)
    response = jnp.take_along_axis(tokens, offset, axis=1)
    return jnp.where(column < prompts.length[:, None], padded, response)
