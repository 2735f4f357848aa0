"""What a method's rollout is made by, and what its update needs beyond it: chosen from its row."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from saki_jax.data.batches import PromptBatches
from saki_jax.evals.grader import open_grader
from saki_jax.models import hf
from saki_jax.models.sharding import batch_sharding
from saki_jax.rollout.batch import Prompts, Rollout
from saki_jax.rollout.engine import RolloutFn, make_rollout
from saki_jax.rollout.generate import make_generate
from saki_jax.rollout.keys import Purpose
from saki_jax.rollout.score import make_score
from saki_jax.rollout.skd import make_skd
from saki_jax.rollout.spec import RolloutSpec
from saki_jax.train import grpo
from saki_jax.train.baselines import (
    INTERLEAVED,
    METHODS,
    REFERENCE,
    REWARDS,
    TEACHER_LOGITS,
    TEACHER_SAMPLE,
    Extras,
)
from saki_jax.train.pair import Pair

ExtrasFn = Callable[[Rollout, int], tuple[Extras, dict[str, Any]]]


def rollout_spec(config: ConfigDict, pair: Pair) -> RolloutSpec:
    """The static side of the rollouts of a run."""
    settings = dict(config.rollout.items()) | {"end_ids": pair.end_ids}
    return RolloutSpec(
        pad_id=pair.tokenizer.pad_id,
        teacher_sample=METHODS[config.method].needs == TEACHER_SAMPLE,
        **settings,
    )


def make_method_rollout(config: ConfigDict, pair: Pair, spec: RolloutSpec) -> RolloutFn:
    """(student weights, teacher weights, prompts, epsilon, key, on_progress) -> Rollout."""
    method = METHODS[config.method]
    if method.rollout == INTERLEAVED:
        return make_skd(pair.student, pair.teacher, spec, top_k=config.skd.top_k, mesh=pair.mesh)
    if method.needs == REWARDS:
        return _student_alone(pair, spec)
    return make_rollout(pair.student, pair.teacher, spec, pair.mesh)


def _student_alone(pair: Pair, spec: RolloutSpec) -> RolloutFn:
    """Generation that no teacher scores."""
    generate = make_generate(pair.student, spec, pair.mesh)

    def rollout(
        student_params: Any,
        teacher_params: Any,
        prompts: Prompts,
        epsilon: float,
        key: jax.Array,
        on_progress: Callable | None = None,
    ) -> Rollout:
        del teacher_params, epsilon
        return generate(student_params, prompts, key, Purpose.DRAFT, on_progress)

    return rollout


def make_extras(
    config: ConfigDict, pair: Pair, spec: RolloutSpec, batches: PromptBatches
) -> ExtrasFn:
    """(rollout, step) -> what the update needs beyond the rollout, and figures of its making."""
    needs = METHODS[config.method].needs
    if needs == REFERENCE:
        _, params = hf.load(config.student, dtype=pair.dtype, mesh=pair.mesh)
        score = make_score(pair.student, spec, pair.mesh)
        return lambda rollout, step: (Extras(log_ref=score(params, rollout).log_t), {})
    if needs == TEACHER_LOGITS:
        return lambda rollout, step: (Extras(teacher_params=pair.teacher_params), {})
    if needs == REWARDS:
        return _reward_extras(config, pair, batches)
    return lambda rollout, step: (Extras(), {})


def _reward_extras(config: ConfigDict, pair: Pair, batches: PromptBatches) -> ExtrasFn:
    grader = "exact" if config.data.source == "addition" else config.grpo.grader

    def extras(rollout: Rollout, step: int) -> tuple[Extras, dict[str, Any]]:
        with open_grader(grader) as grade_all:
            earned, figures = grpo.rewards(
                rollout, batches.at(step).problems, pair.tokenizer, grade_all
            )
        advantage = grpo.group_advantages(jnp.asarray(earned), config.data.samples)
        by_token = jnp.broadcast_to(advantage[:, None], rollout.tokens.shape)
        return Extras(reward=jax.device_put(by_token, batch_sharding(pair.mesh))), figures

    return extras
