"""What all commands with ``--config FILE --config.key=value`` have in common.

Configurations are `ml_collections.ConfigDict`; a key goes by its dotted name (``rollout.slots``).
"""

import difflib
import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags


class ConfigError(ValueError):
    """The configuration asks for something that cannot be; the message says what and what to do."""


def read_command(arguments: Sequence[str], usage: str = "") -> tuple[ConfigDict, Path | None]:
    """The configuration with its overrides, and the folder named with --workdir.

    Args:
      arguments: of the command line, without the program.
      usage: said when they cannot be understood.

    Returns:
      The configuration, and the folder or None.

    Raises:
      ConfigError: no such file, a key that does not exist (with the nearest one that does), a
        value of another type, an argument that is none.
    """
    file = config_file(arguments, usage)
    if not Path(file.split(":")[0]).is_file():
        raise ConfigError(f"--config={file}: there is no such file; see the folder configs/")
    known = flatten(_parse([f"--config={file}"], usage).config)
    for name in filter(None, map(_override, arguments)):
        if name not in known:
            raise ConfigError(unknown_key(name, known))
    values = _parse(arguments, usage)
    return values.config, Path(values.workdir) if values.workdir else None


def _parse(arguments: Sequence[str], usage: str) -> flags.FlagValues:
    values = flags.FlagValues()
    given, sys.argv = sys.argv, ["saki_jax", *arguments]  # config_flags looks for overrides there
    config_flags.DEFINE_config_file(
        "config", None, "configs/NAME.py, or configs/NAME.py:ARGUMENT", flag_values=values
    )
    flags.DEFINE_string("workdir", None, "the folder of the results", flag_values=values)
    try:
        rest = values(sys.argv)[1:]
    except flags.Error as error:
        raise ConfigError(str(error)) from error
    finally:
        sys.argv = given
    if rest:
        raise ConfigError(f"{' '.join(rest)}: options look like --config.key=value; {usage}")
    return values


def config_file(arguments: Sequence[str], usage: str = "") -> str:
    """What was given as --config, with its argument behind a colon.

    Raises:
      ConfigError: nothing was.
    """
    for place, argument in enumerate(arguments):
        name, equals, value = argument.lstrip("-").partition("=")
        if argument.startswith("-") and name == "config":
            if equals:
                return value
            if place + 1 < len(arguments):
                return arguments[place + 1]
    raise ConfigError(f"--config is missing; {usage}")


def _override(argument: str) -> str | None:
    """The dotted key of --config.key=value, --config.key or --noconfig.key."""
    match = re.match(r"--?(?:no)?config\.([^=]+)", argument)
    return match[1] if match else None


def flatten(config: ConfigDict) -> dict[str, Any]:
    """{"data.path": ..., ...}: every leaf under its dotted name; tuples become lists as in JSON."""
    flat = {}
    for key, value in config.items():
        if isinstance(value, ConfigDict):
            flat |= {f"{key}.{name}": leaf for name, leaf in flatten(value).items()}
        else:
            flat[key] = _as_json(value)
    return flat


def get(config: ConfigDict, name: str) -> Any:
    """The value under a dotted name."""
    for part in name.split("."):
        config = config[part]
    return config


def check_one_of(config: ConfigDict, choices: Mapping[str, Iterable[str]]) -> None:
    """Checks keys that have few possible values.

    Args:
      config: the configuration.
      choices: the values allowed for each dotted name.

    Raises:
      ConfigError: naming the first key that has another, and the nearest allowed one.
    """
    for key, allowed in choices.items():
        value, allowed = get(config, key), list(allowed)
        if value not in allowed:
            meant = difflib.get_close_matches(str(value), allowed, n=1)
            hint = f" (nearest: {meant[0]})" if meant else ""
            raise ConfigError(f"{key} is {value!r}; it must be one of {', '.join(allowed)}{hint}")


def check_at_least(config: ConfigDict, least: Mapping[str, float]) -> None:
    """Checks that numbers are finite and not below their bounds.

    Args:
      config: the configuration.
      least: the lowest value allowed for each dotted name.

    Raises:
      ConfigError: naming the first key that is below.
    """
    for key, bound in least.items():
        value = get(config, key)
        if not (math.isfinite(value) and value >= bound):
            raise ConfigError(f"{key} is {value}; it must be at least {bound}")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known dotted key that a misspelt one most likely means, if any comes close.

    >>> nearest("rollout.blok_size", ["rollout.block_size", "rollout.slots"])
    'rollout.block_size'
    >>> nearest("block_size", ["rollout.block_size", "rollout.slots"])
    'rollout.block_size'
    """
    known = list(known)
    leaves = {key.split(".")[-1] for key in known}
    # By last parts: the group may be missing or wrong, and must not outweigh the name itself.
    close = difflib.get_close_matches(name.split(".")[-1], leaves, n=1)
    candidates = [key for key in known if close and key.split(".")[-1] == close[0]]
    return max(candidates, key=lambda key: _likeness(key, name), default=None)


def _likeness(a: str, b: str) -> float:
    return difflib.SequenceMatcher(None, a, b).ratio()


def unknown_key(name: str, known: Iterable[str]) -> str:
    """What to tell somebody who named a key that does not exist."""
    known = list(known)
    inside = [key for key in known if key.startswith(f"{name}.")]
    if inside:
        return f"{name} is a group of keys; set one of {', '.join(inside)}"
    text = f"there is no key {name} in the configuration"
    meant = nearest(name, known)
    if meant:
        return f"{text}; the nearest is {meant}"
    group = name.rpartition(".")[0]
    beside = [key for key in known if key.rpartition(".")[0] == group]
    return f"{text}; there are {', '.join(beside or known)}"


def _as_json(value: Any) -> Any:
    return [_as_json(item) for item in value] if isinstance(value, list | tuple) else value
