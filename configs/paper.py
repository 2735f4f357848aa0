r"""The paper's student runs (Table 5, Appendix A): method and student size are the argument.

    python -m saki_jax.train --config configs/paper.py:saki,1.7b --workdir runs/saki-1.7b \
        --config.student=QWEN3_1.7B_BASE --config.teacher=TEACHER --config.data.path=DAPO_FILE

QWEN3_1.7B_BASE and TEACHER are Hugging Face folders (the teacher: Qwen3-4B-Base after GRPO), and
DAPO_FILE is the processed DAPO-Math-17K. 200 steps of 64 prompts x 8 responses of at most 7,168
tokens, epsilon 0.02 -> 0 at step 51; a step took the paper 233 s on its machine. Everything is a
default of `train.config.default_config`; here is only what depends on method, student and memory.
"""

from ml_collections import ConfigDict

from saki_jax.train.baselines import METHODS
from saki_jax.train.config import ConfigError, default_config

# Tokens a forward pass of the trainer, and rows generated at the same time: what fits into memory.
STUDENTS = {"0.6b": (131072, 128), "1.7b": (65536, 64)}


def get_config(argument: str = "saki,1.7b") -> ConfigDict:
    """`argument` is METHOD,STUDENT, for example saki,1.7b.

    Raises:
      ConfigError: for another method or student size.
    """
    method, _, student = argument.partition(",")
    if method not in METHODS or student not in STUDENTS:
        raise ConfigError(
            f"configs/paper.py:{argument}: expected METHOD,STUDENT with METHOD one of "
            f"{', '.join(METHODS)} and STUDENT one of {', '.join(STUDENTS)}"
        )
    config = default_config()
    config.method = method
    # Base configurations name 151643 only; the chat template ends a turn with 151645.
    config.rollout.end_ids = (151643, 151645)
    config.trainer.tokens_per_micro_batch, config.rollout.slots = STUDENTS[student]
    config.trainer.remat = True
    config.checkpoint.keep_steps = (50, 100, 200)
    config.probe.steps = (50, 100, 200)  # measured where --config.probe.path names a probe
    return config
