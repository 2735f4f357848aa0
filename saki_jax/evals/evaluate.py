"""Evaluation of a model alone: k sampled responses a problem, graded; no teacher anywhere.

Usage::

    generate = make_generate(student, spec)              # rollout.generate; spec has the eval cap
    encoded = encode_prompts(problems, tokenizer, prompt_format, max_length=...)
    scores = evaluate(generate, params, encoded, tokenizer, samples=8, seed=0, batch_rows=256)
    scores.summary()                                     # {"mean_at_8": .., "pass_at_8": .., ..}

Randomness comes from the evaluation seed, the problem's place in the set and the sample's number
under a purpose of its own, so training seed, epsilon and step cannot change an evaluation and an
evaluation cannot change training (case R21). Two evaluations of one set share their noise.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from saki_jax.data.template import EncodedPrompts
from saki_jax.evals.grade import Verdict, grade_all
from saki_jax.evals.graded import Response, Scores, score_responses
from saki_jax.models.lm import Params
from saki_jax.models.tokenizer import Tokenizer
from saki_jax.rollout.batch import Prompts, Rollout
from saki_jax.rollout.keys import Purpose, step_key

log = logging.getLogger(__name__)

GradeAll = Callable[[Sequence[tuple[str, str]]], list[Verdict]]
"""Verdicts of (gold, response) pairs: `grade.grade_all`, or that of `grader.open_grader`."""

Generate = Callable[..., Rollout]
"""``(params, prompts, key, purpose, on_progress=None) -> Rollout``, see `rollout.generate`."""


class TeacherCalledError(RuntimeError):
    """An evaluation's rollout says that the teacher ran; its scores would not be the student's."""


def evaluate(
    generate: Generate,
    params: Params,
    encoded: EncodedPrompts,
    tokenizer: Tokenizer,
    *,
    samples: int,
    seed: int,
    batch_rows: int = 0,
    grade_all: GradeAll = grade_all,
    on_progress: Callable | None = None,
) -> Scores:
    """Samples and grades ``samples`` responses to every problem.

    Args:
      generate: student-only generation, made for the evaluation's own length cap.
      params: the model's parameters.
      encoded: the problems, distinct ids.
      tokenizer: decodes responses.
      samples: k.
      seed: of the evaluation, apart from any training seed.
      batch_rows: rows a call, the same every call: the last is filled up with rows that are
        thrown away. 0: one call with all rows.
      grade_all: judges the responses of a batch.
      on_progress: handed to ``generate``.

    Raises:
      TeacherCalledError: when a rollout counts teacher forwards.
      ValueError: when ids repeat.
    """
    refuse_repeated_ids(encoded)
    rows = len(encoded) * samples
    size = batch_rows or rows
    key = step_key(seed, 0)
    responses = []
    for first in range(0, rows, size):
        responses += respond(
            generate,
            params,
            encoded,
            tokenizer,
            samples=samples,
            key=key,
            first=first,
            size=size,
            grade_all=grade_all,
            on_progress=on_progress,
        )
    return score_responses(responses, samples, tokenizer)


def refuse_repeated_ids(encoded: EncodedPrompts) -> None:
    """Raises ValueError when two of the problems have one id."""
    ids = [problem.id for problem in encoded.problems]
    repeated = [name for name, n in Counter(ids).items() if n > 1]
    if repeated:
        raise ValueError(
            f"{len(repeated)} problem ids occur more than once (first: {repeated[0]!r}); samples "
            "are grouped by id, so pass distinct problems (prompts.distinct_for_evaluation)"
        )


def respond(
    generate: Generate,
    params: Params,
    encoded: EncodedPrompts,
    tokenizer: Tokenizer,
    *,
    samples: int,
    key: jax.Array,
    first: int,
    size: int,
    grade_all: GradeAll = grade_all,
    on_progress: Callable | None = None,
) -> list[Response]:
    """Generates and grades one batch: rows ``first .. first + size`` of the list of all samples.

    A row's response depends on the key, its problem and its sample alone, not on the batch.

    Args:
      generate, params, encoded, tokenizer, samples, grade_all, on_progress: as in `evaluate`.
      key: of the evaluation.
      first: the first row, problem-major: row n * k + m is sample m of problem n.
      size: rows generated; those behind the last are thrown away.

    Raises:
      TeacherCalledError: when the rollout counts teacher forwards.
    """
    prompts, real = evaluation_rows(encoded, samples, first, size)
    rollout = generate(params, prompts, key, Purpose.EVALUATION, on_progress=on_progress)
    found = _fetch(rollout)
    problems = [encoded.problems[(first + r) // samples] for r in range(real)]
    tokens = [tuple(found["tokens"][r, : found["length"][r]].tolist()) for r in range(real)]
    texts = [tokenizer.decode(ids) for ids in tokens]
    golds = [problem.answer for problem in problems]
    verdicts = grade_all(list(zip(golds, texts, strict=True)))
    return [
        Response(
            problem_id=problems[r].id,
            sample=(first + r) % samples,
            gold=golds[r],
            tokens=tokens[r],
            text=texts[r],
            verdict=verdicts[r],
            finished=bool(found["finished"][r]),
            nonfinite=bool(found["nonfinite"][r]),
        )
        for r in range(real)
    ]


def evaluation_rows(
    encoded: EncodedPrompts, samples: int, first: int, size: int
) -> tuple[Prompts, int]:
    """Rows ``first .. first + size`` of the problem-major list of all samples.

    Returns:
      The prompts of exactly ``size`` rows and how many of them are real; those behind repeat the
      last problem under sequence ids of their own.
    """
    row = np.arange(first, first + size)
    problem = np.minimum(row // samples, len(encoded) - 1)
    prompts = Prompts(
        tokens=jnp.asarray(encoded.tokens[problem]),
        length=jnp.asarray(encoded.length[problem]),
        sequence_id=jnp.asarray(row, jnp.int32),
    )
    return prompts, min(size, len(encoded) * samples - first)


def _fetch(rollout: Rollout) -> dict[str, np.ndarray]:
    """The arrays that grading needs, on the host; checks that no teacher ran."""
    wanted = {
        name: getattr(rollout, name) for name in ("tokens", "length", "finished", "nonfinite")
    }
    found = jax.device_get({**wanted, "teacher": rollout.counters.teacher_forwards})
    if found["teacher"] != 0:
        raise TeacherCalledError(
            f"{found['teacher']} teacher forwards during evaluation; the student must be evaluated "
            "alone: pass a `generate` made by rollout.generate.make_generate"
        )
    return found
