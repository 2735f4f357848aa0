"""python -m saki_jax.train --config configs/X.py [--config.key=value ...] [--workdir DIR]

The same command on the same folder continues a run that was not finished, says of a finished one
that it is finished, and refuses the run of another configuration.
"""

import logging
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # tokenizers need no torch
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from absl import flags
from ml_collections import ConfigDict, config_flags

from saki_jax.data.prompts import DataError
from saki_jax.models.hf import CheckpointError as WeightsError
from saki_jax.models.tokenizer import TokenizerError
from saki_jax.train import loop
from saki_jax.train.checkpoint import CheckpointError
from saki_jax.train.config import ConfigError, flatten, unknown_key, validate

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
        config, workdir = read_command(arguments)
        validate(config)
        loop.run(config, workdir)
    except _TOLD as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted; the same command continues the run from its last checkpoint")


def read_command(arguments: Sequence[str]) -> tuple[ConfigDict, Path]:
    """The configuration with its overrides, and the folder of the run.

    Args:
      arguments: of the command line, without the program.

    Raises:
      ConfigError: no such file, a key that does not exist (with the nearest one that does), a
        value of another type, an argument that is none.
    """
    file = _config_argument(arguments)
    if not Path(file.split(":")[0]).is_file():
        raise ConfigError(f"--config={file}: there is no such file; see the folder configs/")
    known = flatten(_parse([f"--config={file}"]).config)
    for name in filter(None, map(_override, arguments)):
        if name not in known:
            raise ConfigError(unknown_key(name, known))
    values = _parse(arguments)
    name = Path(file.split(":")[0]).stem
    return values.config, Path(values.workdir or f"runs/{name}")


def _parse(arguments: Sequence[str]) -> flags.FlagValues:
    values = flags.FlagValues()
    given, sys.argv = sys.argv, ["train", *arguments]  # config_flags looks for overrides there
    config_flags.DEFINE_config_file(
        "config", None, "configs/NAME.py, or configs/NAME.py:ARGUMENT", flag_values=values
    )
    flags.DEFINE_string("workdir", None, "the run's folder", flag_values=values)
    try:
        rest = values(sys.argv)[1:]
    except flags.Error as error:
        raise ConfigError(str(error)) from error
    finally:
        sys.argv = given
    if rest:
        raise ConfigError(f"{' '.join(rest)}: options look like --config.key=value; {_USAGE}")
    return values


def _config_argument(arguments: Sequence[str]) -> str:
    """What was given as --config."""
    for place, argument in enumerate(arguments):
        name, equals, value = argument.lstrip("-").partition("=")
        if argument.startswith("-") and name == "config":
            if equals:
                return value
            if place + 1 < len(arguments):
                return arguments[place + 1]
    raise ConfigError(f"--config is missing; {_USAGE}")


def _override(argument: str) -> str | None:
    """The dotted key of --config.key=value, --config.key or --noconfig.key."""
    match = re.match(r"--?(?:no)?config\.([^=]+)", argument)
    return match[1] if match else None


if __name__ == "__main__":
    main(sys.argv[1:])
