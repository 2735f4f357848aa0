"""One optimiser step on a rollout batch: packed micro-batches in a loop, one division by N_valid.

    Rollout --route--> Routed --pack--> loop over micro-batches (gradient of the token sum)
            --/ N_valid--> clip, AdamW --> TrainState

Rows are packed into lines, and the loop makes as many passes as there are tokens for: the cost
follows the valid tokens. The sum over the tokens of the whole batch is divided once, so loss and
gradient are the same for every packing and every number of devices (METHODS section 3).
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
from saki_jax.rollout.packing import shape_for
from saki_jax.train.baselines import Extras, Method
from saki_jax.train.examples import Examples, packed_examples
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
    tokens_per_micro_batch: int = 16384,
    shards: int = 1,
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
      tokens_per_micro_batch: slots of a forward pass over all devices (`packing.shape_for`). It
        decides memory and speed, not the result.
      shards: devices that the lines of a pass are spread over.
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
        rows, width = rollout.tokens.shape
        longest = rollout.prompts.tokens.shape[1] + width - 1
        examples, passes = packed_examples(
            rollout,
            routed,
            Signals(rollout.log_p, rollout.log_t, extras.log_ref, extras.reward),
            weights,
            shape_for(rows, longest, tokens_per_micro_batch, shards),
        )

        def token_sum(params: Any, micro: Examples) -> tuple[jax.Array, Report]:
            return method.loss(
                _predictor(student, params, micro),
                None if teacher is None else _predictor(teacher, extras.teacher_params, micro),
                micro,
                method.advantage,
                objective,
                chunk,
            )

        def micro_batch(i: Any) -> Examples:
            return jax.tree.map(lambda x: x[i], examples)

        def add(i: jax.Array, sums: tuple[Any, Report]) -> tuple[Any, Report]:
            total, report = sums
            grads, more = jax.grad(token_sum, has_aux=True)(params, micro_batch(i))
            total = jax.tree.map(lambda a, g: a + g.astype(jnp.float32), total, grads)
            return total, report.merged(more)

        _, report = jax.eval_shape(lambda: token_sum(params, micro_batch(0)))
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), (params, report))
        total, report = jax.lax.fori_loop(0, passes, add, nothing)
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
    """One forward pass over the lines of a micro-batch."""
    hidden, _ = model.forward(params, micro.sequence, None, None, micro.segment)
    return Predictor(functools.partial(model.logits, params), response_hidden(hidden, micro))


def _step_stats(report: Report, divisor: jax.Array, valid: Bool[Array, "B T"]) -> Stats:
    """The report on all micro-batches as the figures of the step."""
    parts = {name: value / divisor for name, value in report.parts.items()}
    means = {name: total / jnp.maximum(count, 1.0) for name, (total, count) in report.means.items()}
    whole = {"loss": sum(parts.values()), "num_valid": masked_sum(valid, valid)}
    return parts | means | report.peaks | whole


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
