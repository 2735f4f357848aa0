"""One optimiser step on a rollout batch: micro-batches in a scan, one division by N_valid.

    Rollout --route--> Routed --micro_batches--> scan(value and gradient of the token sum)
            --/ N_valid--> clip, AdamW --> TrainState

The sum over the tokens of the whole batch is divided once, so loss and gradient are the same for
every cut into micro-batches and every number of devices (METHODS section 3).
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool

from saki_jax.models.lm import LanguageModel
from saki_jax.rollout.batch import Rollout
from saki_jax.train.baselines import Method
from saki_jax.train.examples import Examples, bucket_widths, cut, narrowed, sequences
from saki_jax.train.losses import Stats, response_hidden
from saki_jax.train.objective import Objective, Signals, masked_sum, token_weights
from saki_jax.train.state import TrainState, compute_copy

Update = Callable[..., tuple[TrainState, Stats]]


def make_update(
    student: LanguageModel,
    method: Method,
    objective: Objective,
    optimizer: optax.GradientTransformation,
    *,
    micro_batch: int = 0,
    length_buckets: int = 1,
    chunk: int = 512,
    compute_dtype: Any = jnp.float32,
    shardings: TrainState | None = None,
) -> Update:
    """The jitted ``(state, rollout, key, log_ref=None) -> (state, stats)``.

    The given state is donated. `log_ref` [B, T] is for methods that need a reference.

    Args:
      student: its `forward` (without cache) and `logits` are differentiated.
      method, objective: what is optimised.
      optimizer: gets the gradient of the whole batch once.
      micro_batch: rows a forward pass, 0 for all at once.
      length_buckets: 1: every pass has all T response columns. n: rows are sorted by length and a
        micro-batch has T, T/2, .. or T/2^(n-1) columns, whichever is enough. The result is the
        same, and so is the number of compiled programs; one program then holds n variants of the
        pass and takes about n times as long to compile.
      chunk: positions whose logits exist at the same time.
      compute_dtype: of the copy of the weights that the passes use; gradients of micro-batches
        are summed in float32.
      shardings: of the state, as `models.sharding.state_shardings` makes them.

    The stats are float32 scalars: `loss` and its two parts, `grad_norm` before clipping, the
    rates of every clip and clamp, `applied`. A step whose loss or gradient is not finite, and one
    without a valid token (loss 0), leave params, moments and the optimizer's count as they were
    and are counted in the state.
    """

    def gradient(
        params: Any, rollout: Rollout, key: jax.Array, log_ref: jax.Array | None
    ) -> tuple[Any, Stats]:
        rows = Examples(
            sequence=sequences(rollout),
            prompt_length=rollout.prompts.length,
            tokens=rollout.tokens,
            routed=method.route(rollout, key),
            signals=Signals(log_p=rollout.log_p, log_t=rollout.log_t, log_ref=log_ref),
        )
        examples = cut(rows, micro_batch or rows.tokens.shape[0], by_length=length_buckets > 1)
        weights, denominator = token_weights(objective.aggregation, examples.routed.valid)
        widths = bucket_widths(rows.tokens.shape[1], length_buckets)

        def token_sum(params: Any, micro: Examples, weights: jax.Array):
            hidden, _ = student.forward(params, micro.sequence, None, None)
            return method.loss(
                functools.partial(student.logits, params),
                response_hidden(hidden, micro),
                micro,
                weights,
                method.advantage,
                objective,
                chunk,
            )

        def at_width(width: int) -> Callable:
            def run(micro: Examples, weights: jax.Array):
                return jax.grad(token_sum, has_aux=True)(
                    params, narrowed(micro, width), weights[:, :width]
                )

            return run

        def add(total: Any, micro: tuple[Examples, jax.Array]):
            longest = micro[0].routed.valid.sum(axis=1).max()
            enough = jnp.searchsorted(jnp.array(widths), longest)
            grads, stats = jax.lax.switch(enough, [at_width(width) for width in widths], *micro)
            return jax.tree.map(lambda a, g: a + g.astype(jnp.float32), total, grads), stats

        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params)
        total, stats = jax.lax.scan(add, zeros, (examples, weights))
        divisor = jnp.maximum(denominator, 1.0)
        grads = jax.tree.map(lambda g: g / divisor, total)
        return grads, _step_stats(stats, denominator, examples.routed.valid)

    def update(
        state: TrainState, rollout: Rollout, key: jax.Array, log_ref: jax.Array | None = None
    ) -> tuple[TrainState, Stats]:
        params = compute_copy(state.params, compute_dtype)
        grads, stats = gradient(params, rollout, key, log_ref)
        stats["grad_norm"] = optax.tree.norm(grads)
        return _apply(state, grads, stats, rollout.nonfinite.any(), optimizer)

    out = None if shardings is None else (shardings, None)
    return jax.jit(update, donate_argnums=0, out_shardings=out)


def _step_stats(stats: Stats, denominator: jax.Array, valid: Bool[Array, "A B T"]) -> Stats:
    """Sums over micro-batches [A] as the figures of the step."""
    gap_max = stats.pop("log_p_gap_max").max()
    total = {name: values.sum() for name, values in stats.items()}
    num_valid = masked_sum(valid, valid)

    def per(count: jax.Array) -> Callable[[str], jax.Array]:
        return lambda name: total[name] / jnp.maximum(count, 1.0)

    whole, token = per(denominator), per(num_valid)
    free, distilled = per(total["surrogate_tokens"]), per(total["teacher_mode_tokens"])
    parts = {name: whole(name) for name in ("loss_surrogate", "loss_teacher_mode")}
    return parts | {
        "loss": sum(parts.values()),
        "num_valid": num_valid,
        "teacher_mode_rate": token("teacher_mode_tokens"),
        "teacher_mode_nll": distilled("teacher_mode_nll"),
        "advantage_mean": free("advantage"),
        "k1_clamp_rate": free("advantage_clamped"),
        "ratio_clip_rate": free("ratio_clipped"),
        "dual_clip_rate": free("dual_clipped"),
        "log_ratio_clamp_rate": free("log_ratio_clamped"),
        "log_p_gap_mean": token("log_p_gap"),
        "log_p_gap_max": gap_max,
    }


def _apply(
    state: TrainState,
    grads: Any,
    stats: Stats,
    some_row_nonfinite: Bool[Array, ""],
    optimizer: optax.GradientTransformation,
) -> tuple[TrainState, Stats]:
    """The optimiser step, or the untouched state with its counters moved on."""
    finite = jnp.isfinite(stats["loss"]) & jnp.isfinite(stats["grad_norm"])
    empty = stats["num_valid"] == 0
    apply = finite & ~empty
    # A batch emptied by rows that were not finite is a fault of the models, not of the data.
    faulty = ~finite | (empty & some_row_nonfinite)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    moved = (optax.apply_updates(state.params, updates), opt_state)
    params, opt_state = jax.tree.map(
        lambda new, old: jnp.where(apply, new, old), moved, (state.params, state.opt_state)
    )
    state = TrainState(
        step=state.step + 1,
        params=params,
        opt_state=opt_state,
        skipped_steps=state.skipped_steps + faulty.astype(jnp.int32),
        skipped_in_row=jnp.where(faulty, state.skipped_in_row + 1, 0),
        empty_batches=state.empty_batches + empty.astype(jnp.int32),
    )
    return state, stats | {"applied": apply.astype(jnp.float32)}
