r"""The teacher of the paper: GRPO on a base model with a rule-based reward (Table 4).

    python -m saki_jax.train --config configs/teacher_grpo.py --workdir runs/teacher \
        --config.student=QWEN3_4B_BASE --config.data.path=DAPO_FILE
    python -m saki_jax.export runs/teacher TEACHER      # the folder for --config.teacher=TEACHER

One epoch of 64 prompts x 8 responses, reward 1 where the last box holds the answer. The model that
is trained is `student` here; no teacher takes part.

    python -m saki_jax.train --config configs/teacher_grpo.py:addition --workdir runs/teacher-small

is the same on the embedded addition task, on CPU, in a few minutes.
"""

from pathlib import Path

from ml_collections import ConfigDict

import saki_jax
from saki_jax.data.addition import MAX_PROMPT, MAX_RESPONSE
from saki_jax.train.config import ConfigError, default_config

ASSETS = Path(saki_jax.__file__).parent / "assets"


def get_config(size: str = "4b") -> ConfigDict:
    """`size` is 4b (the paper's) or addition (the embedded task).

    Raises:
      ConfigError: for another size.
    """
    sizes = {"addition": _addition, "4b": _table_4}
    if size not in sizes:
        raise ConfigError(f"configs/teacher_grpo.py:{size}: expected one of {', '.join(sizes)}")
    config = default_config()
    config.method = "grpo"
    config.epsilon.kind = "constant"
    config.epsilon.start = 0.0
    config.eval.teacher = False
    sizes[size](config)
    return config


def _table_4(config: ConfigDict) -> None:
    # The 17,909 prompts of the processed DAPO file that fit make 279 full batches of 64: an epoch.
    config.steps = 279
    config.data.epoch_end = "drop"
    config.rollout.end_ids = (151643, 151645)
    config.rollout.slots = 64
    config.trainer.tokens_per_micro_batch = 32768
    config.trainer.remat = True


def _addition(config: ConfigDict) -> None:
    config.student = str(ASSETS / "addition_student")
    config.steps = 120
    config.optimizer.learning_rate = 3e-4
    config.optimizer.eps = 1e-6  # see configs/quickstart.py
    config.data.source = "addition"
    config.data.template = "raw"
    config.data.instruction = ""
    config.data.max_prompt_length = MAX_PROMPT
    config.data.prompts_per_step = 16
    config.rollout.response_length = MAX_RESPONSE
    config.eval.source = "addition"
    config.eval.response_length = MAX_RESPONSE
    config.eval.problems = 256
    config.eval.batch_rows = 2048
    config.checkpoint.every = 20
