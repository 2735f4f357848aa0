"""python -m saki_jax.evals --config configs/eval.py --config.checkpoint=DIR [--workdir OUT]

Evaluates a model alone and keeps all responses. The same command on the same folder continues an
evaluation that was not finished, and refuses one of another model or protocol.
"""

import logging
import sys
from collections.abc import Sequence

from saki_jax.command import read_command
from saki_jax.data.prompts import DataError
from saki_jax.evals import session, tables
from saki_jax.evals.checkpoint import SubjectError
from saki_jax.evals.config import ConfigError, validate
from saki_jax.evals.folder import FolderError
from saki_jax.evals.grader import GraderError
from saki_jax.evals.responses import ResponsesError
from saki_jax.models.hf import CheckpointError
from saki_jax.models.tokenizer import TokenizerError

_USAGE = "usage: python -m saki_jax.evals --config FILE [--config.key=value ...] [--workdir DIR]"

# What a user can set right: told in words, without a traceback.
_TOLD = (
    CheckpointError,
    ConfigError,
    DataError,
    FolderError,
    GraderError,
    ResponsesError,
    SubjectError,
    TokenizerError,
)


def main(arguments: Sequence[str]) -> None:
    """Evaluates and prints the table; ends the process with words and a status on errors."""
    if {"-h", "--help", "-help"} & set(arguments):
        print(f"{__doc__}\nEvery key, with what it does: saki_jax/evals/config.py")
        return
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        config, workdir = read_command(arguments, _USAGE)
        validate(config)
        workdir = workdir or session.default_workdir(config)
        summary = session.run(config, workdir)
    except _TOLD as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted; the same command continues the evaluation")
    print(tables.summary_table(summary).to_markdown())
    print(f"responses and summary: {workdir}")


if __name__ == "__main__":
    main(sys.argv[1:])
