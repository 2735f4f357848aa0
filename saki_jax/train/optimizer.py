"""AdamW behind a global-norm clip (METHODS section 5, Table 5)."""

import optax


def make_optimizer(
    *,
    learning_rate: float,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    clip_norm: float = 1.0,
) -> optax.GradientTransformation:
    """Clip the gradient of the whole batch to `clip_norm`, then AdamW.

    The clip comes before the moments and sees the gradient once, after all micro-batches. The
    rate is constant and the weight decay acts on every parameter, as in the paper's setting.
    """
    return optax.chain(
        optax.clip_by_global_norm(clip_norm),
        optax.adamw(learning_rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay),
    )
