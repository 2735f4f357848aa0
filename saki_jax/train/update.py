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
from saki_jax.train.baselines import Extras, Method
from saki_jax.train.examples import Examples, bucket_widths, cut, narrowed, sequences
from saki_jax.train.losses import Predictor, Report, response_hidden
from saki_jax.train.objective import Objective, Signals, masked_sum, token_weights
from saki_jax.train.state import TrainState, compute_copy

Stats = dict[str, jax.Array]
Update = Callable[..., tuple[TrainState, Stats]]

NO_EXTRAS = Extras()


def make_update(
    student: LanguageModel,
    method: Method,
    objective: Objective,
    optimizer: optax.GradientTransformation,
    *,
    teacher: LanguageModel | None = None,
    micro_batch: int = 0,
    length_buckets: int = 1,
    chunk: int = 512,
    compute_dtype: Any = jnp.float32,
    shardings: TrainState | None = None,
) -> Update:
    """The jitted ``(state, rollout, key, extras=NO_EXTRAS) -> (state, stats)``.

    The given state is donated. `extras` holds what the method needs beyond the rollout.

    Args:
      student: its `forward` (without cache) and `logits` are differentiated.
      method, objective: what is optimised.
      optimizer: gets the gradient of the whole batch once.
      teacher: for methods whose loss needs its distributions; it runs over the same passes, with
        ``extras.teacher_params``.
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
        params: Any, rollout: Rollout, key: jax.Array, extras: Extras
    ) -> tuple[Any, Stats]:
        routed = method.route(rollout, key)
        weights, denominator = token_weights(
            objective.aggregation, routed.valid, objective.micro_batch_rows
        )
        rows = Examples(
            sequence=sequences(rollout),
            prompt_length=rollout.prompts.length,
            tokens=rollout.tokens,
            routed=routed,
            signals=Signals(rollout.log_p, rollout.log_t, extras.log_ref, extras.reward),
            weights=weights,
        )
        examples = cut(rows, micro_batch or rows.tokens.shape[0], by_length=length_buckets > 1)
        widths = bucket_widths(rows.tokens.shape[1], length_buckets)

        def token_sum(params: Any, micro: Examples) -> tuple[jax.Array, Report]:
            return method.loss(
                _predictor(student, params, micro),
                None if teacher is None else _predictor(teacher, extras.teacher_params, micro),
                micro,
                method.advantage,
                objective,
                chunk,
            )

        def at_width(width: int) -> Callable:
            return lambda micro: jax.grad(token_sum, has_aux=True)(params, narrowed(micro, width))

        def add(total: Any, micro: Examples) -> tuple[Any, Report]:
            longest = micro.routed.valid.sum(axis=1).max()
            enough = jnp.searchsorted(jnp.array(widths), longest)
            grads, report = jax.lax.switch(enough, [at_width(width) for width in widths], micro)
            return jax.tree.map(lambda a, g: a + g.astype(jnp.float32), total, grads), report

        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params)
        total, report = jax.lax.scan(add, zeros, examples)
        divisor = jnp.maximum(denominator, 1.0)
        grads = jax.tree.map(lambda g: g / divisor, total)
        return grads, _step_stats(report, divisor, routed.valid)

    def update(
        state: TrainState, rollout: Rollout, key: jax.Array, extras: Extras = NO_EXTRAS
    ) -> tuple[TrainState, Stats]:
        params = compute_copy(state.params, compute_dtype)
        grads, stats = gradient(params, rollout, key, extras)
        stats["grad_norm"] = optax.tree.norm(grads)
        return _apply(state, grads, stats, rollout.nonfinite.any(), optimizer)

    out = None if shardings is None else (shardings, None)
    return jax.jit(update, donate_argnums=0, out_shardings=out)


def _predictor(model: LanguageModel, params: Any, micro: Examples) -> Predictor:
    """One forward pass over the rows of a micro-batch."""
    hidden, _ = model.forward(params, micro.sequence, None, None)
    return Predictor(functools.partial(model.logits, params), response_hidden(hidden, micro))


def _step_stats(report: Report, divisor: jax.Array, valid: Bool[Array, "B T"]) -> Stats:
    """Reports of micro-batches [A] as the figures of the step."""
    parts = {name: values.sum() / divisor for name, values in report.parts.items()}
    means = {
        name: total.sum() / jnp.maximum(count.sum(), 1.0)
        for name, (total, count) in report.means.items()
    }
    peaks = {name: values.max() for name, values in report.peaks.items()}
    return (
        parts | means | peaks | {"loss": sum(parts.values()), "num_valid": masked_sum(valid, valid)}
    )


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
