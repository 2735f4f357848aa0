"""python -m saki_jax.train --config configs/X.py [--config.key=value ...] [--workdir DIR]

The same command on the same folder continues a run that was not finished, says of a finished one
that it is finished, and refuses the run of another configuration.
"""

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # tokenizers need no torch
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from ml_collections import ConfigDict

from saki_jax.command import config_file, read_command
from saki_jax.data.prompts import DataError
from saki_jax.models.hf import CheckpointError as WeightsError
from saki_jax.models.tokenizer import TokenizerError
from saki_jax.train import loop
from saki_jax.train.checkpoint import CheckpointError
from saki_jax.train.config import ConfigError
from saki_jax.train.validate import validate

_USAGE = "usage: python -m saki_jax.train --config FILE [--config.key=value ...] [--workdir DIR]"

# What a user can set right: told in words, without a traceback.
_TOLD = (
    ConfigError,
    DataError,
    TokenizerError,
    WeightsError,
    CheckpointError,
    loop.NotFiniteError,
)


def main(arguments: Sequence[str]) -> None:
    """Reads the command line and trains; ends the process with words and a status on errors."""
    if {"-h", "--help", "-help"} & set(arguments):
        print(f"{__doc__}\nEvery key, with what it does: saki_jax/train/config.py")
        return
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    try:
        config, workdir = read_arguments(arguments)
        validate(config)
        loop.run(config, workdir)
    except _TOLD as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted; the same command continues the run from its last checkpoint")


def read_arguments(arguments: Sequence[str]) -> tuple[ConfigDict, Path]:
    """The configuration with its overrides, and the folder of the run.

    Raises:
      ConfigError: see `command.read_command`.
    """
    config, workdir = read_command(arguments, _USAGE)
    name = Path(config_file(arguments).split(":")[0]).stem
    return config, workdir or Path("runs") / name


if __name__ == "__main__":
    main(sys.argv[1:])
