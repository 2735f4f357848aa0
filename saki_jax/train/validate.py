"""What is refused of a training configuration before anything is loaded."""

from pathlib import Path

from ml_collections import ConfigDict

from saki_jax.command import (
    ConfigError,
    check_at_least,
    check_one_of,
    flatten,
    get,
    unknown_key,
)
from saki_jax.data.batches import EPOCH_ENDS
from saki_jax.data.template import TEMPLATES
from saki_jax.evals.config import COMPUTE_DTYPES
from saki_jax.evals.grader import GRADERS
from saki_jax.rollout.spec import SOLVERS
from saki_jax.train.baselines import METHODS, REWARDS
from saki_jax.train.config import default_config
from saki_jax.train.objective import AGGREGATIONS
from saki_jax.train.schedule import check_schedule

SOURCES = ("addition", "file")
ADVANTAGE_LOGP = ("current", "rollout")


def validate(config: ConfigDict) -> None:
    """Checks all that can be told from the configuration alone.

    Raises:
      ConfigError: naming the key, what it says and what it may say.
    """
    _check_keys(config)
    check_one_of(
        config,
        {
            "method": METHODS,
            "compute_dtype": COMPUTE_DTYPES,
            "data.source": SOURCES,
            "data.template": TEMPLATES,
            "data.epoch_end": EPOCH_ENDS,
            "rollout.solver": SOLVERS,
            "objective.advantage_logp": ADVANTAGE_LOGP,
            "objective.aggregation": AGGREGATIONS,
            "eval.source": SOURCES,
            "eval.grader": GRADERS,
            "grpo.grader": GRADERS,
        },
    )
    check_at_least(
        config,
        {
            "steps": 1,
            "seed": 0,
            "data.max_prompt_length": 1,
            "data.prompts_per_step": 1,
            "data.samples": 1,
            "rollout.response_length": 1,
            "rollout.block_size": 1,
            "rollout.slots": 0,
            "rollout.cache_gib": 0,
            "rollout.refill_rows": 0,
            "rollout.prefill_prompts": 1,
            "rollout.prefill_buckets": 1,
            "rollout.compact": 0,
            "rollout.waves_per_call": 1,
            "rollout.score_tokens": 1,
            "objective.micro_batch_rows": 1,
            "objective.teacher_mode_coef": 0,
            "objective.ratio_clip": 0,
            "objective.dual_clip": 1,
            "skd.top_k": 1,
            "optimizer.learning_rate": 0,
            "optimizer.weight_decay": 0,
            "trainer.tokens_per_micro_batch": 1,
            "trainer.chunk": 1,
            "trainer.max_skips_in_row": 1,
            "eval.every": 0,
            "eval.problems": 0,
            "eval.samples": 1,
            "eval.response_length": 1,
            "eval.batch_rows": 1,
            "checkpoint.every": 1,
            "checkpoint.keep": 1,
        },
    )
    for key in ("objective.k1_clip", "objective.log_ratio_clip", "optimizer.clip_norm"):
        if not get(config, key) > 0:
            raise ConfigError(f"{key} is {get(config, key)}; it must be greater than 0")
    by_reward = METHODS[config.method].needs == REWARDS
    for key in ("student",) if by_reward else ("student", "teacher"):
        if not config[key]:
            raise ConfigError(f"{key} is empty; set --config.{key}=FOLDER (Hugging Face format)")
    if config.data.source == "file" and not config.data.path:
        raise ConfigError(
            "data.path is empty; set --config.data.path=FILE (JSON lines, JSON or parquet)"
        )
    if by_reward and config.data.samples < 2:
        raise ConfigError(
            f"data.samples is {config.data.samples}; {config.method} compares the rewards of the "
            "samples of a prompt, so it needs at least 2"
        )
    _check_sampling(config)
    _check_probe(config)
    _check_mesh(config)
    try:
        check_schedule(config.epsilon.to_dict())
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _check_keys(config: ConfigDict) -> None:
    """A config that was not made from `default_config` may lack keys or have others."""
    known, given = flatten(default_config()), flatten(config)
    for name in sorted(given.keys() - known.keys()):
        raise ConfigError(unknown_key(name, known))
    for name in sorted(known.keys() - given.keys()):
        raise ConfigError(f"the key {name} is missing; start from train.config.default_config()")


def _check_sampling(config: ConfigDict) -> None:
    plain = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    for name, only in plain.items():
        if config.rollout[name] != only:
            raise ConfigError(
                f"rollout.{name} is {config.rollout[name]}; it must be {only}. Anything else would "
                "sample from another distribution than the p that is recorded and tested against q"
            )


def _check_probe(config: ConfigDict) -> None:
    if not config.probe.path:
        return
    if not config.teacher:
        raise ConfigError("probe.path is set, but no teacher, whom the probe asks; set teacher")
    if not Path(config.probe.path).is_file():
        raise ConfigError(
            f"probe.path is {config.probe.path}, which is no file; build a probe first (python -m "
            "saki_jax.evals.probe build), the same for all runs that are to be compared"
        )
    outside = [step for step in config.probe.steps if not 1 <= step <= config.steps]
    if outside or not config.probe.steps:
        raise ConfigError(
            f"probe.steps is {tuple(config.probe.steps)}; with probe.path it must name at least "
            f"one step, each from 1 to steps={config.steps}"
        )


def _check_mesh(config: ConfigDict) -> None:
    sizes = dict(config.mesh.items())
    free = [axis for axis, size in sizes.items() if size == -1]
    if len(free) > 1 or any(size < 1 and size != -1 for size in sizes.values()):
        raise ConfigError(
            f"mesh is {sizes}; each size is at least 1, and one of them may be -1, what is left"
        )
