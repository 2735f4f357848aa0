"""The loss of SKD: KL(T || pi) over the whole vocabulary, at every valid position."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from saki_jax.models.token_logprobs import map_positions
from saki_jax.train.examples import Examples
from saki_jax.train.losses import Advantage, Predictor, Report, logprob_gaps, mean_over
from saki_jax.train.objective import Objective


def forward_kl(
    student: Predictor,
    teacher: Predictor,
    examples: Examples,
    advantage: Advantage | None,
    objective: Objective,
    chunk: int,
) -> tuple[Float[Array, ""], Report]:
    """Σ weights * KL(T || pi), called like `losses.routed_surrogate`.

    The logits of both models exist for `chunk` positions at a time and are computed again in the
    backward pass; only the student's are differentiated. There is no ratio and no clip, so
    advantage and objective have no say.
    """
    del advantage, objective

    def position(part: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        hidden, teacher_hidden, ids = part
        log_pi = jax.nn.log_softmax(student.head(hidden).astype(jnp.float32))
        log_t = jax.nn.log_softmax(teacher.head(teacher_hidden).astype(jnp.float32))
        ids = jnp.clip(ids, 0, log_pi.shape[-1] - 1)
        chosen = jnp.take_along_axis(log_pi, ids[..., None], axis=-1)[..., 0]
        return kl(jax.lax.stop_gradient(log_t), log_pi), chosen

    valid = examples.routed.valid
    parts = (student.hidden, teacher.hidden, examples.tokens)
    divergence, log_pi = map_positions(position, parts, valid, chunk=chunk)
    loss = (examples.weights * divergence).sum()
    gaps = logprob_gaps(log_pi, examples)
    report = Report(
        parts={"loss_forward_kl": loss},
        means={
            "teacher_mode_rate": mean_over(examples.routed.distilled, valid),
            "log_p_gap_mean": mean_over(gaps, valid),
        },
        peaks={"log_p_gap_max": gaps.max()},
    )
    return loss, jax.lax.stop_gradient(report)


def kl(log_t: Float[Array, "*B V"], log_pi: Float[Array, "*B V"]) -> Float[Array, "*B"]:
    """Σ_v T(v) (log T(v) - log pi(v)); a token with T = 0 adds nothing, whatever pi gives it.

    >>> kl(jnp.array([0.0, -jnp.inf]), jnp.log(jnp.array([0.5, 0.5]))).round(4).tolist()
    0.6931
    """
    t = jnp.exp(log_t)
    return jnp.where(t > 0, t * (log_t - log_pi), 0.0).sum(axis=-1)
