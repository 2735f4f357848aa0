"""``python -m saki_jax.evals --config configs/eval.py --config.checkpoint=DIR [--workdir OUT]``."""

import logging
import sys

from absl import app, flags
from ml_collections import config_flags

from saki_jax.data.prompts import DataError
from saki_jax.evals import session
from saki_jax.evals.checkpoint import SubjectError
from saki_jax.evals.config import ConfigError
from saki_jax.evals.folder import FolderError
from saki_jax.evals.responses import ResponsesError
from saki_jax.models.hf import CheckpointError
from saki_jax.models.tokenizer import TokenizerError

_CONFIG = config_flags.DEFINE_config_file("config", None, "the configuration of the evaluation")
_WORKDIR = flags.DEFINE_string(
    "workdir", "", "folder of the results; default: in the run's folder, or evals/<name>"
)

_ASKED_WRONGLY = (
    CheckpointError,
    ConfigError,
    DataError,
    FolderError,
    ResponsesError,
    SubjectError,
    TokenizerError,
)


def main(arguments: list[str]) -> None:
    """Evaluates and prints the table."""
    if len(arguments) > 1:
        raise app.UsageError(f"unknown arguments: {' '.join(arguments[1:])}")
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr, force=True)
    config = _CONFIG.value
    try:
        workdir = _WORKDIR.value or session.default_workdir(config)
        summary = session.run(config, workdir)
    except _ASKED_WRONGLY as error:
        sys.exit(f"{type(error).__name__}: {error}")
    print(session.tables.summary_table(summary).to_markdown())
    print(f"responses and summary: {workdir}")


if __name__ == "__main__":
    flags.mark_flag_as_required("config")
    app.run(main)
