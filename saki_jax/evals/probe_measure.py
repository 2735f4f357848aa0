"""What a student says at the probe's prefixes, beside the teacher (Appendix E).

    C1   = S(argmax T)          mass on the teacher's top token
    C16  = S(the 16 likeliest under T)
    KL   = KL(T || S)
    H    = H(S)

C16 - C1 is the paper's key quantity: mass on what the teacher supports but would not say first.
Logits exist for a few positions at a time, so memory does not grow with positions x vocabulary.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from saki_jax.evals.probe_file import Probe, ProbeError, read_npz
from saki_jax.models.lm import LanguageModel
from saki_jax.rollout.loop import mesh_context

TOP = 16
FIGURES = ("c1", "c16", "c16_minus_c1", "kl", "entropy")
"""Shares in [0, 1] for the first three, nats for the others."""

Figures = dict[str, np.ndarray]
Measure = Callable[[Probe, Any, Any], Figures]


def position_figures(
    logits_s: jax.Array, logits_t: jax.Array, *, top: int = TOP
) -> dict[str, jax.Array]:
    """The figures from logits [*B, V] of student and teacher; [*B] float32 each.

    A token with T = 0 adds nothing to KL; one with T > 0 = S makes it infinite. With no more than
    16 tokens C16 is 1: where the vocabulary is that small, `top` says which C_top stands under the
    name c16.
    """
    log_s = jax.nn.log_softmax(logits_s.astype(jnp.float32), axis=-1)
    log_t = jax.nn.log_softmax(logits_t.astype(jnp.float32), axis=-1)
    s, t = jnp.exp(log_s), jnp.exp(log_t)
    _, top = jax.lax.top_k(log_t, min(top, log_t.shape[-1]))  # equal ones: the lowest id first
    supported = jnp.take_along_axis(s, top, axis=-1)
    gap = jnp.where(t > 0, log_t, 0.0) - jnp.where(t > 0, log_s, 0.0)
    kl = jnp.where(t > 0, t * gap, 0.0).sum(axis=-1)
    entropy = -jnp.where(s > 0, s * jnp.where(s > 0, log_s, 0.0), 0.0).sum(axis=-1)
    return {
        "c1": supported[..., 0],
        "c16": supported.sum(axis=-1),
        "c16_minus_c1": supported[..., 1:].sum(axis=-1),
        "kl": jnp.maximum(kl, 0.0),
        "entropy": entropy,
    }


def make_measure(
    student: LanguageModel,
    teacher: LanguageModel,
    *,
    top: int = TOP,
    rows: int = 4,
    segment: int = 512,
    positions: int = 64,
    mesh: Mesh | None = None,
) -> Measure:
    """Builds ``measure(probe, student_params, teacher_params) -> {figure: [n] float32}``.

    Call it once and keep the result: the compiled programs live in it, a few for each pair of
    models (sequence lengths are rounded up to powers of two).

    Args:
      student, teacher: the models, of one vocabulary.
      top: see `position_figures`.
      rows: sequences together.
      segment: tokens a forward pass; attention's memory is rows x segment x length.
      positions: positions whose logits exist at the same time.
      mesh: where the weights lie.
    """

    def hidden(model: LanguageModel, params: Any, tokens: jax.Array, index: jax.Array) -> jax.Array:
        """Hidden states [R, Q, D] at the positions index [R, Q] of tokens [R, J]."""
        count, length = tokens.shape
        parts = jnp.moveaxis(tokens.reshape(count, -1, min(segment, length)), 1, 0)
        starts = jnp.arange(len(parts), dtype=jnp.int32) * parts.shape[2]

        def one(cache: Any, part: tuple[jax.Array, jax.Array]) -> tuple[Any, jax.Array]:
            start = jnp.full((count,), part[1], jnp.int32)
            states, cache = model.forward(params, part[0], start, cache)
            return cache, states

        _, states = jax.lax.scan(one, model.init_cache(count, length), (parts, starts))
        states = jnp.moveaxis(states, 0, 1).reshape(count, length, -1)
        return jnp.take_along_axis(states, index[:, :, None], axis=1)

    @jax.jit
    def figures(params_s: Any, params_t: Any, tokens: jax.Array, index: jax.Array) -> dict:
        of_s = hidden(student, params_s, tokens, index)
        of_t = hidden(teacher, params_t, tokens, index)

        def one(pair: tuple[jax.Array, jax.Array]) -> dict[str, jax.Array]:
            return position_figures(
                student.logits(params_s, pair[0]), teacher.logits(params_t, pair[1]), top=top
            )

        flat = jax.tree.map(lambda x: x.reshape(-1, x.shape[-1]), (of_s, of_t))
        found = jax.lax.map(one, flat, batch_size=positions)
        return jax.tree.map(lambda x: x.reshape(index.shape), found)

    def measure(probe: Probe, student_params: Any, teacher_params: Any) -> Figures:
        result = {name: np.full(len(probe), np.nan, np.float32) for name in FIGURES}
        with mesh_context(mesh):
            for tokens, index, where in _batches(probe, rows, segment):
                found = jax.device_get(figures(student_params, teacher_params, tokens, index))
                there = where >= 0
                for name, values in found.items():
                    result[name][where[there]] = values[there]
        return result

    measure.figures = figures  # for whoever wants to see what is compiled
    return measure


def save_figures(path: str | Path, probe: Probe, found: Figures, meta: dict[str, Any]) -> None:
    """Writes a measurement (.npz) with the probe's fingerprint and where it comes from.

    Raises:
      ProbeError: the file exists.
    """
    path = Path(path)
    if path.exists():
        raise ProbeError(f"{path} exists and is not overwritten; choose another name")
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "xb") as file:
        told = json.dumps(meta | {"probe": probe.fingerprint()})
        np.savez_compressed(file, meta=np.array(told), **found)


def load_figures(path: str | Path, probe: Probe) -> tuple[Figures, dict[str, Any]]:
    """Reads a measurement of this probe, and its meta.

    Raises:
      ProbeError: it is no measurement, or one of another probe.
    """
    arrays = read_npz(path)
    missing = [name for name in (*FIGURES, "meta") if name not in arrays]
    if missing:
        raise ProbeError(f"{path} is not a measurement: it has no {', '.join(missing)}")
    meta = json.loads(str(arrays["meta"]))
    if meta["probe"] != probe.fingerprint():
        raise ProbeError(
            f"{path} was measured at the prefixes of the probe {meta['probe']}, this one is "
            f"{probe.fingerprint()}; measure again"
        )
    return {name: arrays[name] for name in FIGURES}, meta


def _batches(probe: Probe, rows: int, segment: int) -> list[tuple[np.ndarray, ...]]:
    """(tokens [R, J], index [R, Q], where [R, Q]) for all positions.

    ``index`` is the slot that predicts a position, ``where`` the position's number, -1 for padding.
    Sequences of similar length come together; J and Q are rounded up to few different values.
    """
    by_row: list[list[int]] = [[] for _ in range(len(probe.offset) - 1)]
    for number, row in enumerate(probe.row.tolist()):
        by_row[row].append(number)
    order = sorted(range(len(by_row)), key=lambda r: (len(probe.sequence(r)), r))
    batches = []
    for first in range(0, len(order), rows):
        chosen = order[first : first + rows]
        longest = max(len(probe.sequence(r)) for r in chosen)
        length = segment if longest > segment else min(8, segment)
        while length < longest:
            length = 2 * length if length >= segment else min(2 * length, segment)
        most = 1
        while most < max(len(by_row[r]) for r in chosen):
            most *= 2
        tokens = np.zeros((rows, length), np.int32)
        index = np.zeros((rows, most), np.int32)
        where = np.full((rows, most), -1, np.int64)
        for i, r in enumerate(chosen):
            tokens[i, : len(probe.sequence(r))] = probe.sequence(r)
            numbers = by_row[r]
            index[i, : len(numbers)] = probe.prefix[numbers] - 1
            where[i, : len(numbers)] = numbers
        batches.append((tokens, index, where))
    return batches
