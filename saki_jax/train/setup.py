"""From a configuration to everything a run uses: mesh, models, data, compiled programs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from saki_jax.data.batches import PromptBatches, sample_rows
from saki_jax.models import hf, sharding
from saki_jax.models.qwen3 import init_params
from saki_jax.rollout.batch import Prompts, Rollout
from saki_jax.train.baselines import EXACT_Q, METHODS, TEACHER_LOGITS
from saki_jax.train.config import ConfigError
from saki_jax.train.objective import Clips, Objective
from saki_jax.train.optimizer import make_optimizer
from saki_jax.train.pair import Pair, load_pair
from saki_jax.train.state import TrainState, abstract_state, init_state, make_rollout_copy
from saki_jax.train.supply import ExtrasFn, make_extras, make_method_rollout, rollout_spec
from saki_jax.train.tasks import Evaluator, make_encoder, make_evaluators, training_problems
from saki_jax.train.update import Update, make_update


@dataclass(frozen=True)
class Session:
    """What the loop calls. Each compiled program is made once and kept here.

    Attributes:
      pair: student and teacher.
      batches: prompts of each step, a function of seed and step.
      samples: M responses a prompt.
      guided: whether the rollout follows epsilon.
      rollout: (student weights, teacher weights, prompts, epsilon, key, on_progress) -> Rollout.
      update: (state, rollout, key, extras) -> (state, stats); donates the state.
      extras: (rollout, step) -> what the update needs beyond it, and figures of its making.
      copy: masters -> weights for rollout and evaluation.
      initial: () -> the state of step 0.
      template: shapes, dtypes and shardings of the state.
      evaluate_student, evaluate_teacher: None where not asked for.
    """

    pair: Pair
    batches: PromptBatches
    samples: int
    guided: bool
    rollout: Callable[..., Rollout]
    update: Update
    extras: ExtrasFn
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
        mesh = self.pair.mesh
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
    pair = load_pair(config, mesh)
    encode = make_encoder(config, pair.tokenizer)
    method = METHODS[config.method]
    optimizer = make_optimizer(**config.optimizer)
    weights = jax.eval_shape(lambda: init_params(pair.student_config, jax.random.key(0)))
    template = abstract_state(weights, optimizer)
    shardings = sharding.state_shardings(mesh, pair.student_config, template)

    def initial() -> TrainState:
        _, params = hf.load(config.student, dtype=jnp.float32, mesh=mesh)
        return init_state(params, optimizer, shardings)

    spec = rollout_spec(config, pair)
    batches = PromptBatches(
        encode(training_problems(config)),
        prompts_per_step=config.data.prompts_per_step,
        seed=config.seed,
        epoch_end=config.data.epoch_end,
    )
    student_alone, teacher_alone = make_evaluators(config, pair, encode)
    return Session(
        pair=pair,
        batches=batches,
        samples=config.data.samples,
        guided=method.rollout == EXACT_Q,
        rollout=make_method_rollout(config, pair, spec),
        update=make_update(
            pair.student,
            method,
            _objective(config),
            optimizer,
            teacher=pair.teacher if method.needs == TEACHER_LOGITS else None,
            tokens_per_micro_batch=config.trainer.tokens_per_micro_batch,
            shards=mesh.shape["data"] * mesh.shape["fsdp"],
            chunk=config.trainer.chunk,
            compute_dtype=pair.dtype,
            shardings=shardings,
        ),
        extras=make_extras(config, pair, spec, batches),
        copy=make_rollout_copy(pair.dtype, shardings.params),
        initial=initial,
        template=jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), template, shardings
        ),
        evaluate_student=student_alone,
        evaluate_teacher=teacher_alone,
    )


def _mesh(config: ConfigDict) -> Mesh:
    rows = config.data.prompts_per_step * config.data.samples
    try:
        mesh = sharding.make_mesh(**config.mesh)
        sharding.check_batch(mesh, rows, "rows a step (data.prompts_per_step x data.samples)")
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return mesh


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
        micro_batch_rows=settings.micro_batch_rows,
        extrapolation=settings.extrapolation,
    )
