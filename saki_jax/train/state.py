"""What a training run carries from step to step."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct

Params = Any
Shardings = Any
Scalar = Any  # int32 []; a tree of shardings has this struct too


@struct.dataclass
class TrainState:
    """Float32 masters, moments and counters.

    Attributes:
      step: rollouts trained on so far; a skipped step counts, the optimizer's own count does not
        move then.
      params: float32 master weights. Everything that computes uses a cast copy of them.
      opt_state: the optimizer's moments (float32) and count.
      skipped_steps: steps with a loss or gradient that was not finite.
      skipped_in_row: how many of them came last, without a sound step between.
      empty_batches: steps without a single valid token.
    """

    step: Scalar
    params: Params
    opt_state: optax.OptState
    skipped_steps: Scalar
    skipped_in_row: Scalar
    empty_batches: Scalar


def _fresh(params: Params, optimizer: optax.GradientTransformation) -> TrainState:
    # jnp.copy, and one zero a field: no two leaves may share a buffer, or donating both fails.
    masters = jax.tree.map(lambda x: jnp.copy(x).astype(jnp.float32), params)
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=masters,
        opt_state=optimizer.init(masters),
        skipped_steps=jnp.zeros((), jnp.int32),
        skipped_in_row=jnp.zeros((), jnp.int32),
        empty_batches=jnp.zeros((), jnp.int32),
    )


def abstract_state(params: Params, optimizer: optax.GradientTransformation) -> TrainState:
    """Shapes and dtypes of the state, without arrays."""
    return jax.eval_shape(lambda p: _fresh(p, optimizer), params)


def init_state(
    params: Params,
    optimizer: optax.GradientTransformation,
    shardings: TrainState | None = None,
) -> TrainState:
    """Step 0 from `params`, which are copied: the state owns all its buffers."""
    make = jax.jit(lambda p: _fresh(p, optimizer), out_shardings=shardings)
    return make(params)


def compute_copy(params: Params, dtype: Any) -> Params:
    """The masters in the dtype of the forward passes (traceable)."""
    return jax.tree.map(lambda x: x.astype(dtype), params)


def make_rollout_copy(dtype: Any, param_shardings: Shardings | None = None):
    """A jitted ``params -> cast copy`` for generation and evaluation.

    The copy shares no buffer with the masters even where the dtype is the same, so it outlives
    the donation of the train state.
    """

    def copy(params: Params) -> Params:
        return jax.tree.map(lambda x: jnp.copy(x).astype(dtype), params)

    return jax.jit(copy, out_shardings=param_shardings)
