"""A small run of the addition task on random checkpoints, as a configuration."""

from ml_collections import ConfigDict

from saki_jax.data.addition import MAX_PROMPT
from saki_jax.train.config import default_config
from saki_jax.train.validate import validate


def small_config(checkpoints, **changes) -> ConfigDict:
    """4 prompts x 2 responses of at most 12 tokens, one device, no evaluation; `changes` are
    dotted keys with __ for the dot.
    """
    config = default_config()
    config.student, config.teacher = map(str, checkpoints)
    config.steps = 6
    config.epsilon.zero_at = 4
    config.optimizer.learning_rate = 1e-2
    config.data.source = "addition"
    config.data.template = "raw"
    config.data.instruction = ""
    config.data.max_prompt_length = MAX_PROMPT
    config.data.problems = 64
    config.data.prompts_per_step = 4
    config.data.samples = 2
    config.rollout.response_length = 12
    config.rollout.block_size = 4
    config.mesh.data = 1
    config.checkpoint.every = 3
    config.eval.response_length = 8
    config.eval.problems = 3
    config.eval.samples = 2
    for name, value in changes.items():
        *groups, leaf = name.split("__")
        node = config
        for group in groups:
            node = node[group]
        node[leaf] = value
    validate(config)
    return config
