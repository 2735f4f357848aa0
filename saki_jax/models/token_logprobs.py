"""Log-probabilities of given tokens without ever holding [B, T, V]."""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def token_logprobs(
    logits_fn: Callable[[jax.Array], jax.Array],
    hidden: jax.Array,
    targets: jax.Array,
    *,
    chunk: int = 512,
) -> tuple[jax.Array, jax.Array]:
    """log softmax at the targets, and the entropy, of every position, a chunk at a time.

    The positions are walked through in slices of the time axis, all rows at once (rows may lie on
    different devices), of about ``chunk`` (row, position) pairs; the logits of a slice are
    computed again in the backward pass. Everything is reduced in float32.

    Args:
      logits_fn: hidden [*B, D] -> logits [*B, V]; may close over traced parameters.
      hidden: [B, T, D].
      targets: int [B, T, n]. Ids outside [0, V) are allowed where the caller masks the result:
        there it is the finite log-probability of some other token, with a finite gradient.
      chunk: pairs whose logits may be alive together; at least one position of every row is.

    Returns:
      log-probabilities float32 [B, T, n], differentiable; entropy in nats float32 [B, T], a
      measurement without gradient.
    """
    rows, length, _ = hidden.shape
    width = min(max(chunk // rows, 1), length)
    steps = -(-length // width)

    def slices(x: jax.Array) -> jax.Array:
        """[B, T, n] -> [steps, B, width, n], zeros behind T."""
        x = jnp.pad(x, ((0, 0), (0, steps * width - length), (0, 0)))
        return jnp.moveaxis(x.reshape(rows, steps, width, x.shape[-1]), 1, 0)

    def joined(x: jax.Array) -> jax.Array:
        """[steps, B, width, *n] -> [B, T, *n]."""
        x = jnp.moveaxis(x, 0, 1)
        return x.reshape(rows, steps * width, *x.shape[3:])[:, :length]

    @jax.checkpoint
    def one(part: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return _gather(logits_fn(part[0]), part[1])

    parts = (slices(hidden), slices(targets))
    if steps == 1:
        picked, entropy = one(jax.tree.map(lambda x: x[0], parts))
        return picked, entropy
    picked, entropy = jax.lax.map(one, parts)
    return joined(picked), joined(entropy)


def _gather(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """logits [*B, V], targets [*B, n] -> log-probabilities [*B, n], entropy [*B]."""
    logits = logits.astype(jnp.float32)
    log_z = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    # take_along_axis gives NaN outside the range, and a masked NaN still spoils the gradient.
    inside = jnp.clip(targets, 0, logits.shape[-1] - 1)
    picked = jnp.take_along_axis(logits, inside, axis=-1) - log_z
    frozen = jax.lax.stop_gradient(logits - log_z)
    terms = jnp.exp(frozen) * jnp.where(frozen > -jnp.inf, frozen, 0.0)  # 0 log 0 = 0
    return picked, -jnp.sum(terms, axis=-1)
