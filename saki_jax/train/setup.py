"""From a configuration to everything a run uses: mesh, models, data, compiled programs."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from saki_jax.data import addition
from saki_jax.data.batches import PromptBatches, sample_rows
from saki_jax.data.prompts import Problem, deduplicate, distinct_for_evaluation, read_jsonl
from saki_jax.data.template import EncodedPrompts, PromptFormat, encode_prompts
from saki_jax.evals.evaluate import Scores, evaluate
from saki_jax.evals.grader import open_grader
from saki_jax.models import hf, sharding
from saki_jax.models import tokenizer as tokenizers
from saki_jax.models.compatibility import check_pair
from saki_jax.models.config import Qwen3Config
from saki_jax.models.lm import LanguageModel
from saki_jax.models.qwen3 import default_compute_dtype, init_params, language_model
from saki_jax.models.tokenizer import Tokenizer
from saki_jax.rollout.batch import Prompts, Rollout
from saki_jax.rollout.engine import make_rollout
from saki_jax.rollout.generate import make_generate
from saki_jax.rollout.score import make_score
from saki_jax.rollout.spec import RolloutSpec
from saki_jax.train.baselines import METHODS, REFERENCE, STUDENT_ONLY, TEACHER_SAMPLE, Objective
from saki_jax.train.config import ConfigError
from saki_jax.train.objective import Clips
from saki_jax.train.optimizer import make_optimizer
from saki_jax.train.state import TrainState, abstract_state, init_state, make_rollout_copy
from saki_jax.train.update import Update, make_update

Evaluator = Callable[..., Scores]  # (weights, on_progress) -> Scores

# Evaluation samples of one operand pair never come from the training side, whatever these say.
_TRAINING_PROBLEMS_SEED, _HELD_OUT_PROBLEMS_SEED = 1, 2


@dataclass(frozen=True)
class Models:
    """Student and teacher: what they are and where they lie. The student's weights are state.

    Attributes:
      mesh: where everything lies.
      dtype: of the forward passes and of every copy of weights but the masters.
      student_config: of the student.
      student, teacher: as pure functions.
      teacher_params: in `dtype`.
      tokenizer: the student's; the teacher's has the same token map.
      end_ids: what ends a response.
    """

    mesh: Mesh
    dtype: Any
    student_config: Qwen3Config
    student: LanguageModel
    teacher: LanguageModel
    teacher_params: Any
    tokenizer: Tokenizer
    end_ids: tuple[int, ...]


@dataclass(frozen=True)
class Session:
    """What the loop calls. Each compiled program is made once and kept here.

    Attributes:
      models: see `Models`.
      batches: prompts of each step, a function of seed and step.
      samples: M responses a prompt.
      guided: False for methods whose rollout is the student's own.
      rollout: (student weights, teacher weights, prompts, epsilon, key, on_progress) -> Rollout.
      update: (state, rollout, key, log_ref) -> (state, stats); donates the state.
      reference: rollout -> log-probabilities of the initial student [B, T]; None where the method
        needs none.
      copy: masters -> weights for rollout and evaluation.
      initial: () -> the state of step 0.
      template: shapes, dtypes and shardings of the state.
      evaluate_student, evaluate_teacher: None where not asked for.
    """

    models: Models
    batches: PromptBatches
    samples: int
    guided: bool
    rollout: Callable[..., Rollout]
    update: Update
    reference: Callable[[Rollout], jax.Array] | None
    copy: Callable[[Any], Any]
    initial: Callable[[], TrainState]
    template: TrainState
    evaluate_student: Evaluator | None
    evaluate_teacher: Evaluator | None

    def next_prompts(self) -> Prompts:
        """The rows of the next step, laid over the mesh; `batches` moves on."""
        rows = Prompts(*map(jnp.asarray, sample_rows(next(self.batches), self.samples)))
        return self.lay_out(rows)

    def lay_out(self, tree: Any) -> Any:
        """Arrays with rows over the devices of the mesh, scalars on every one."""
        mesh = self.models.mesh
        by_row, whole = sharding.batch_sharding(mesh), NamedSharding(mesh, PartitionSpec())
        return jax.tree.map(lambda x: jax.device_put(x, by_row if x.ndim else whole), tree)


def build(config: ConfigDict) -> Session:
    """Loads and checks everything that `config` (already validated) names.

    Raises:
      ConfigError: mesh and batch do not fit each other or the devices.
      DataError, TokenizerError, CheckpointError: a file is not what it must be.
    """
    if not jax.config.jax_threefry_partitionable:
        raise ConfigError(
            "jax_threefry_partitionable is off, so random draws would depend on the number of "
            "devices; leave it on (remove JAX_THREEFRY_PARTITIONABLE)"
        )
    mesh = _mesh(config)
    models = load_models(config, mesh)
    encode = _encoder(config, models.tokenizer)
    method = METHODS[config.method]
    optimizer = make_optimizer(**config.optimizer)
    weights = jax.eval_shape(lambda: init_params(models.student_config, jax.random.key(0)))
    template = abstract_state(weights, optimizer)
    shardings = sharding.state_shardings(mesh, models.student_config, template)

    def initial() -> TrainState:
        _, params = hf.load(config.student, dtype=jnp.float32, mesh=mesh)
        return init_state(params, optimizer, shardings)

    spec = _spec(config, models)
    student_alone, teacher_alone = _evaluators(config, models, encode)
    return Session(
        models=models,
        batches=PromptBatches(
            encode(training_problems(config)),
            prompts_per_step=config.data.prompts_per_step,
            seed=config.seed,
            epoch_end=config.data.epoch_end,
        ),
        samples=config.data.samples,
        guided=method.rollout != STUDENT_ONLY,
        rollout=make_rollout(models.student, models.teacher, spec, mesh),
        update=make_update(
            models.student,
            method,
            _objective(config),
            optimizer,
            micro_batch=_micro_batch(config, mesh),
            length_buckets=config.trainer.length_buckets,
            chunk=config.trainer.chunk,
            compute_dtype=models.dtype,
            shardings=shardings,
        ),
        reference=_reference(config, models, spec) if method.needs == REFERENCE else None,
        copy=make_rollout_copy(models.dtype, shardings.params),
        initial=initial,
        template=jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), template, shardings
        ),
        evaluate_student=student_alone,
        evaluate_teacher=teacher_alone,
    )


def load_models(config: ConfigDict, mesh: Mesh) -> Models:
    """Checks the two folders against each other and loads the teacher.

    Raises:
      CheckpointError, TokenizerError: with the file and what to do.
    """
    dtype = default_compute_dtype() if config.compute_dtype == "auto" else config.compute_dtype
    dtype = jnp.dtype(dtype)
    student_config, _ = hf.inspect(config.student)
    teacher_config, teacher_params = hf.load(config.teacher, dtype=dtype, mesh=mesh)
    tokenizer, teacher_tokenizer = map(tokenizers.load, (config.student, config.teacher))
    check_pair(student_config, teacher_config, tokenizer, teacher_tokenizer)
    return Models(
        mesh=mesh,
        dtype=dtype,
        student_config=student_config,
        student=language_model(student_config, dtype, remat=config.trainer.remat),
        teacher=language_model(teacher_config, dtype),
        teacher_params=teacher_params,
        tokenizer=tokenizer,
        end_ids=tokenizers.end_ids((config.student, config.teacher), config.rollout.end_ids),
    )


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


def _mesh(config: ConfigDict) -> Mesh:
    rows = config.data.prompts_per_step * config.data.samples
    try:
        mesh = sharding.make_mesh(**config.mesh)
        sharding.check_batch(mesh, rows, "rows a step (data.prompts_per_step x data.samples)")
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return mesh


def _micro_batch(config: ConfigDict, mesh: Mesh) -> int:
    """Rows a forward pass: what was asked for, rounded up to what the devices can share."""
    rows = config.data.prompts_per_step * config.data.samples
    shards = mesh.shape["data"] * mesh.shape["fsdp"]
    return min(-(-(config.trainer.micro_batch or rows) // shards) * shards, rows)


def _encoder(config: ConfigDict, tokenizer: Tokenizer) -> Callable[..., EncodedPrompts]:
    data = config.data
    return functools.partial(
        encode_prompts,
        tokenizer=tokenizer,
        prompt_format=PromptFormat(data.template, data.instruction, data.enable_thinking),
        max_length=data.max_prompt_length,
    )


def _spec(config: ConfigDict, models: Models) -> RolloutSpec:
    settings = dict(config.rollout.items()) | {"end_ids": models.end_ids}
    return RolloutSpec(
        pad_id=models.tokenizer.pad_id,
        teacher_sample=METHODS[config.method].needs == TEACHER_SAMPLE,
        **settings,
    )


def _reference(
    config: ConfigDict, models: Models, spec: RolloutSpec
) -> Callable[[Rollout], jax.Array]:
    """Log-probabilities that the initial student gives to the committed tokens."""
    _, params = hf.load(config.student, dtype=models.dtype, mesh=models.mesh)
    score = make_score(models.student, spec, models.mesh)
    return lambda rollout: score(params, rollout).log_t


def _objective(config: ConfigDict) -> Objective:
    settings = config.objective
    return Objective(
        clips=Clips(
            k1=settings.k1_clip,
            ratio=settings.ratio_clip,
            dual=settings.dual_clip,
            log_ratio=settings.log_ratio_clip,
        ),
        advantage_logp=settings.advantage_logp,
        teacher_mode_coef=settings.teacher_mode_coef,
        aggregation=settings.aggregation,
        extrapolation=settings.extrapolation,
    )


def _evaluators(
    config: ConfigDict, models: Models, encode: Callable[..., EncodedPrompts]
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
        end_ids=models.end_ids,
        pad_id=models.tokenizer.pad_id,
    )

    def alone(model: LanguageModel) -> Evaluator:
        generate = make_generate(model, spec, models.mesh)

        def run(params: Any, on_progress: Any = None) -> Scores:
            with open_grader(grader) as grade_all:
                return evaluate(
                    generate,
                    params,
                    encoded,
                    models.tokenizer,
                    samples=settings.samples,
                    seed=settings.seed,
                    batch_rows=min(settings.batch_rows, len(encoded) * settings.samples),
                    grade_all=grade_all,
                    on_progress=on_progress,
                )

        return run

    return alone(models.student), alone(models.teacher) if settings.teacher else None
