r"""The embedded default: a small student learns to add from a good teacher, on CPU, in minutes.

    python -m saki_jax.train --config configs/quickstart.py          (quickstart.py:trb for TRB)

Task: `a+b=` with two to four digits, answered by a carry scratchpad and ``\boxed{sum}``; problems
are generated, those of the evaluation are held out. Teacher and student are the two tiny Qwen3
checkpoints of the package; the student was taught on scratchpads with corrupted columns.
"""

from pathlib import Path

from ml_collections import ConfigDict

import saki_jax
from saki_jax.data.addition import MAX_PROMPT, MAX_RESPONSE
from saki_jax.train.config import default_config

ASSETS = Path(saki_jax.__file__).parent / "assets"


def get_config(method: str = "saki") -> ConfigDict:
    """260 steps of 16 prompts x 8 responses, epsilon 0.02 -> 0 over the first quarter."""
    config = default_config()
    config.method = method
    config.student = str(ASSETS / "addition_student")
    config.teacher = str(ASSETS / "addition_teacher")
    config.steps = 260
    config.note = (
        "The student was taught on scratchpads with corrupted columns (README). One run of one "
        "method on a toy task: it shows that the machinery works and ranks nothing."
    )
    config.epsilon.zero_at = 66
    config.optimizer.learning_rate = 3e-4
    # Adam's first steps have the size of the rate wherever |gradient| > eps. At 1e-8 rounding
    # decided some of them, and other meshes went other ways after one step.
    config.optimizer.eps = 1e-6

    config.data.source = "addition"
    config.data.template = "raw"
    config.data.instruction = ""
    config.data.max_prompt_length = MAX_PROMPT
    config.data.prompts_per_step = 16
    config.data.samples = 8

    # The paper's 25 would let every one of the 16 tokens stand; 4 replace 2 % of the tokens.
    config.skd.top_k = 4

    config.rollout.response_length = MAX_RESPONSE
    config.eval.source = "addition"
    config.eval.response_length = MAX_RESPONSE
    config.eval.problems = 256
    config.eval.batch_rows = 2048
    config.trainer.tokens_per_micro_batch = 2048  # about 5,200 tokens a step: three passes
    config.checkpoint.every = 20
    return config
