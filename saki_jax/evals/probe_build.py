"""Genuine corrections of the initial student, and accepted positions matched to them.

The paper does not say what "matched" means. Here: of the same prompt, at the nearest response
position, each used once; among equals the same response first, then the earlier position.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from saki_jax.data.template import EncodedPrompts
from saki_jax.evals.probe_file import Probe, ProbeError
from saki_jax.rollout.batch import Prompts, Rollout

log = logging.getLogger(__name__)


class Place(NamedTuple):
    """A response position: row of the rollout, position in its response."""

    row: int
    position: int


def match(
    corrected: np.ndarray, usable: np.ndarray, prompt: Sequence[int]
) -> list[tuple[Place, Place]]:
    """Pairs each correction with an accepted position of the same prompt.

    Args:
      corrected: [B, T] bool.
      usable: [B, T] bool, positions that hold a response token of a sound row.
      prompt: [B], the prompt of each row.

    Returns:
      (correction, accepted position) pairs, by prompt, row and position. A correction for which no
      accepted position is left is not among them.
    """
    pairs = []
    by_prompt: dict[int, list[int]] = {}
    for row, name in enumerate(prompt):
        by_prompt.setdefault(name, []).append(row)
    for rows in by_prompt.values():
        found = _places(corrected & usable, rows)
        free = _places(~corrected & usable, rows)
        for row, position in found:
            if not len(free):
                break
            # Distance first, then another response, then the later position.
            rank = np.lexsort(
                (free[:, 0], free[:, 1], free[:, 0] != row, abs(free[:, 1] - position))
            )
            pairs.append((Place(row, position), Place(*free[rank[0]].tolist())))
            free = np.delete(free, rank[0], axis=0)
    return pairs


def build(
    rollout: Callable[..., Rollout],
    student_params: Any,
    teacher_params: Any,
    encoded: EncodedPrompts,
    *,
    epsilon: float,
    key: jax.Array,
    count: int,
    samples: int = 1,
    prompts_per_batch: int = 64,
    meta: dict[str, Any] | None = None,
) -> Probe:
    """Rolls out prompts in order until there are enough corrections.

    Args:
      rollout: of `engine.make_rollout`, for the initial student.
      student_params, teacher_params: its models' weights.
      encoded: prompts; as many are used as it takes.
      epsilon: the KL budget, above 0.
      key: of the draws.
      count: corrections wanted (1,024 in the paper), and as many accepted positions.
      samples: responses a prompt.
      prompts_per_batch: prompts rolled out together; changes nothing but which prompts are last.
      meta: kept with the probe.

    Returns:
      2 · count positions, corrections and their partners alternating, without initial figures.

    Raises:
      ProbeError: epsilon is not above 0, or the prompts do not have enough corrections.
    """
    if not epsilon > 0:
        raise ProbeError(f"without a budget there are no corrections: epsilon is {epsilon}")
    sequences: list[np.ndarray] = []
    places: list[tuple[int, int, int, int]] = []  # sequence, prefix, position, prompt
    for first in range(0, len(encoded), prompts_per_batch):
        index = np.arange(first, min(first + prompts_per_batch, len(encoded)))
        found = rollout(
            student_params, teacher_params, _prompts(encoded, index, samples), epsilon, key
        )
        places += _harvest(found, np.repeat(index, samples), sequences)
        log.info("%d prompts: %d of %d corrections", index[-1] + 1, len(places) // 2, count)
        if len(places) >= 2 * count:
            break
    if len(places) < 2 * count:
        raise ProbeError(
            f"{len(encoded)} prompts x {samples} samples have {len(places) // 2} corrections with "
            f"a match, {count} are wanted: bring more prompts or more samples, or ask for fewer"
        )
    return _assemble(places[: 2 * count], sequences, encoded, meta or {})


def _prompts(encoded: EncodedPrompts, index: np.ndarray, samples: int) -> Prompts:
    """The rows of these prompts, prompt-major; ids depend on prompt and sample alone."""
    rows = np.repeat(index, samples)
    ids = rows * samples + np.tile(np.arange(samples), len(index))
    return Prompts(
        tokens=jnp.asarray(encoded.tokens[rows]),
        length=jnp.asarray(encoded.length[rows]),
        sequence_id=jnp.asarray(ids, jnp.int32),
    )


def _harvest(
    rollout: Rollout, prompt: np.ndarray, sequences: list[np.ndarray]
) -> list[tuple[int, int, int, int]]:
    """The matched places of a rollout; adds the sequences that they lie in."""
    wanted = (rollout.corrected, rollout.length, rollout.nonfinite, rollout.tokens)
    corrected, length, nonfinite, tokens = jax.device_get(wanted)
    prompts, prompt_length = jax.device_get((rollout.prompts.tokens, rollout.prompts.length))
    usable = np.arange(corrected.shape[1])[None, :] < length[:, None]
    usable &= ~nonfinite[:, None]
    number: dict[int, int] = {}
    places = []
    for pair in match(corrected, usable, prompt.tolist()):
        for row, position in pair:
            if row not in number:
                number[row] = len(sequences)
                head = prompts[row, : prompt_length[row]]
                sequences.append(np.concatenate([head, tokens[row, : length[row]]]))
            prefix = int(prompt_length[row]) + position
            places.append((number[row], prefix, position, int(prompt[row])))
    return places


def _assemble(
    places: list[tuple[int, int, int, int]],
    sequences: list[np.ndarray],
    encoded: EncodedPrompts,
    meta: dict[str, Any],
) -> Probe:
    row, prefix, position, prompt = np.array(places, np.int64).T
    rows, row = np.unique(row, return_inverse=True)
    prompts, prompt = np.unique(prompt, return_inverse=True)
    # The last token of a sequence is part of no prefix when nothing behind it is measured.
    kept = [sequences[r][: prefix[row == i].max()] for i, r in enumerate(rows)]
    n = len(places)
    return Probe(
        tokens=np.concatenate(kept).astype(np.int32),
        offset=np.concatenate([[0], np.cumsum([len(s) for s in kept])]),
        row=row,
        prefix=prefix,
        position=position,
        corrected=np.arange(n) % 2 == 0,
        partner=np.arange(n) ^ 1,
        prompt=prompt,
        prompt_ids=np.array([encoded.problems[p].id for p in prompts]),
        initial={},
        meta=meta,
    )


def _places(flags: np.ndarray, rows: Sequence[int]) -> np.ndarray:
    """[m, 2] (row, position) of the set flags in these rows."""
    index, position = np.nonzero(flags[np.asarray(rows)])
    return np.stack([np.asarray(rows)[index], position], axis=1)
