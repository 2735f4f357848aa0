"""The problems of a run: those it is trained on, and evaluations on those it is not."""

import functools
from collections.abc import Callable
from typing import Any

from ml_collections import ConfigDict

from saki_jax.data import addition
from saki_jax.data.prompts import Problem, deduplicate, distinct_for_evaluation, read_jsonl
from saki_jax.data.template import EncodedPrompts, PromptFormat, encode_prompts
from saki_jax.evals.evaluate import evaluate
from saki_jax.evals.graded import Scores
from saki_jax.evals.grader import open_grader
from saki_jax.models.lm import LanguageModel
from saki_jax.models.tokenizer import Tokenizer
from saki_jax.rollout.generate import make_generate
from saki_jax.rollout.spec import RolloutSpec
from saki_jax.train.pair import Pair

Evaluator = Callable[..., Scores]  # (weights, on_progress) -> Scores

# Evaluation samples of one operand pair never come from the training side, whatever these say.
_TRAINING_PROBLEMS_SEED, _HELD_OUT_PROBLEMS_SEED = 1, 2


def training_problems(config: ConfigDict) -> list[Problem]:
    """The problems that are trained on, in file order or as the seed of the task has them."""
    data = config.data
    if data.source == "addition":
        return addition.problems(
            data.problems, held_out=False, seed=_TRAINING_PROBLEMS_SEED, digits=tuple(data.digits)
        )
    problems = read_jsonl(
        data.path,
        problem_field=data.problem_field,
        answer_field=data.answer_field,
        skip_bad_lines=data.skip_bad_lines,
    )
    return deduplicate(problems, remove=data.dedup)


def evaluation_problems(config: ConfigDict) -> list[Problem]:
    """The problems of the evaluations; none where no file is named."""
    source, path, count = config.eval.source, config.eval.path, config.eval.problems
    if source == "addition":
        digits = tuple(config.data.digits)
        return addition.problems(count, held_out=True, seed=_HELD_OUT_PROBLEMS_SEED, digits=digits)
    if not path:
        return []
    data = config.data
    problems = read_jsonl(path, problem_field=data.problem_field, answer_field=data.answer_field)
    return distinct_for_evaluation(problems)[: count or None]


def make_encoder(config: ConfigDict, tokenizer: Tokenizer) -> Callable[..., EncodedPrompts]:
    data = config.data
    return functools.partial(
        encode_prompts,
        tokenizer=tokenizer,
        prompt_format=PromptFormat(data.template, data.instruction, data.enable_thinking),
        max_length=data.max_prompt_length,
    )


def make_evaluators(
    config: ConfigDict, pair: Pair, encode: Callable[..., EncodedPrompts]
) -> tuple[Evaluator | None, Evaluator | None]:
    """Evaluations of the student and of the teacher, each alone, on the same problems."""
    problems = evaluation_problems(config)
    if not problems:
        return None, None
    # Prompts of an evaluation are not capped: a benchmark loses no problem.
    encoded = encode(problems, max_length=10**9)
    settings = config.eval
    grader = "exact" if settings.source == "addition" else settings.grader  # sums need no algebra
    spec = RolloutSpec(
        response_length=settings.response_length,
        end_ids=pair.end_ids,
        pad_id=pair.tokenizer.pad_id,
    )

    def alone(model: LanguageModel) -> Evaluator:
        generate = make_generate(model, spec, pair.mesh)

        def run(params: Any, on_progress: Any = None) -> Scores:
            with open_grader(grader) as grade_all:
                return evaluate(
                    generate,
                    params,
                    encoded,
                    pair.tokenizer,
                    samples=settings.samples,
                    seed=settings.seed,
                    batch_rows=min(settings.batch_rows, len(encoded) * settings.samples),
                    grade_all=grade_all,
                    on_progress=on_progress,
                )

        return run

    with_teacher = settings.teacher and pair.teacher is not None
    return alone(pair.student), alone(pair.teacher) if with_teacher else None
