"""Small models and hand-made rollouts for the tests of the trainer."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from saki_jax.models.lm import LanguageModel
from saki_jax.rollout.batch import Counters, Prompts, Rollout


def bigram(vocab_size: int) -> LanguageModel:
    """A model whose next-token logits are a row of ``params["table"]`` [V, V]."""

    def forward(params, tokens, start, cache, segment_ids=None):
        assert start is None
        assert cache is None
        return params["table"][tokens], None

    return LanguageModel(vocab_size, lambda rows, slots: (), forward, lambda params, hidden: hidden)


def two_way(features: np.ndarray) -> LanguageModel:
    """V = 2 and logits [feature(previous token) · w, 0]: at w = 0 the gradient of log pi(0) is
    half the feature of the token before.
    """

    def forward(params, tokens, start, cache, segment_ids=None):
        return jnp.asarray(features, jnp.float32)[tokens], None

    def logits(params, hidden):
        first = jnp.einsum("...d,d->...", hidden, params["w"])
        return jnp.stack([first, jnp.zeros_like(first)], axis=-1)

    return LanguageModel(2, lambda rows, slots: (), forward, logits)


def padded(rows: list[list], width: int, fill, dtype) -> np.ndarray:
    out = np.full((len(rows), width), fill, dtype)
    for row, values in zip(out, rows, strict=True):
        row[: len(values)] = values
    return out


def make_rollout(
    prompts: list[list[int]],
    responses: list[list[int]],
    *,
    log_p: list[list[float]] | None = None,
    log_t: list[list[float]] | None = None,
    corrected: list[list[bool]] | None = None,
    teacher_mode: list[list[int]] | None = None,
    nonfinite: list[bool] | None = None,
    pad: int = 0,
    junk: float = 0.0,
    epsilon: float = 0.02,
    width: int = 0,
) -> Rollout:
    """A rollout with these responses; numbers behind a row's end are `junk`, ids are `pad`."""
    rows = len(responses)
    width = width or max(1, *(len(r) for r in responses))

    def column(values, fill, dtype):
        if values is None:
            values = [[0] * len(r) for r in responses]
        return jnp.asarray(padded(values, width, fill, dtype))

    tokens = column(responses, pad, np.int32)
    number = lambda values: column(values, junk, np.float32)  # noqa: E731
    scalar = jnp.zeros((), jnp.int32)
    return Rollout(
        prompts=Prompts(
            tokens=jnp.asarray(padded(prompts, max(len(p) for p in prompts), pad, np.int32)),
            length=jnp.asarray([len(p) for p in prompts], jnp.int32),
            sequence_id=jnp.arange(rows, dtype=jnp.int32),
        ),
        tokens=tokens,
        length=jnp.asarray([len(r) for r in responses], jnp.int32),
        finished=jnp.ones(rows, bool),
        nonfinite=jnp.asarray(nonfinite or [False] * rows),
        proposal=tokens,
        corrected=column(corrected, False, bool),
        log_p=number(log_p),
        log_t=number(log_t),
        log_q=number(log_p),
        accept_prob=number(None),
        beta=number(None),
        kl=number(None),
        tv=number(None),
        entropy=number(None),
        teacher_mode=column(teacher_mode, pad, np.int32),
        teacher_sample=column(None, pad, np.int32),
        epsilon=jnp.float32(epsilon),
        counters=Counters(*(jnp.copy(scalar) for _ in dataclasses.fields(Counters))),
    )


KEY = jax.random.key(0)
