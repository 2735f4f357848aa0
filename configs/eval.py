"""Evaluation of a student alone on the seven sets (paper section 5, Appendix A).

    python -m saki_jax.evals --config configs/eval.py --config.checkpoint=DIR --config.sets.dir=SETS

DIR is a run's folder or a Hugging Face folder (base student, teacher), SETS a folder with the files
of the sets (docs/evaluation.md names them). 8 samples a problem at temperature 1, up to 16,384 new
tokens: 12,640 responses for all seven sets. The same command again goes on where it was stopped.

For a try on two CPU cores:

    python -m saki_jax.evals --config configs/eval.py --config.checkpoint=DIR \
        --config.sets.math500=FILE --config.sets.limit=8 --config.max_new_tokens=64

For Qwen3 Base folders evaluated beside trained students, end ids must be the same everywhere:
``--config.end_ids="(151643, 151645)"``, as configs/paper.py has them.
"""

from ml_collections import ConfigDict

from saki_jax.evals.config import default_config


def get_config() -> ConfigDict:
    """The paper's protocol; every key is explained in saki_jax/evals/config.py."""
    return default_config()
