"""The sets of problems that an evaluation's configuration names."""

import logging

from ml_collections import ConfigDict

from saki_jax.command import ConfigError
from saki_jax.data import addition, benchmarks
from saki_jax.data.benchmarks import BENCHMARKS
from saki_jax.data.prompts import Problem

log = logging.getLogger(__name__)

_ADDITION_SEED = 0


def problem_sets(config: ConfigDict) -> dict[str, list[Problem]]:
    """The problems of every set that the configuration names, in the paper's order.

    Raises:
      ConfigError: when none is named.
      DataError: when a file is not what it must be.
    """
    sets = config.sets
    fields = {"question_field": sets.question_field, "answer_field": sets.answer_field}
    files = benchmarks.find_files(sets.dir) if sets.dir else {}
    files |= {name: sets[name].split(",") for name in BENCHMARKS if sets[name]}
    found = {
        name: benchmarks.load(name, files[name], check_size=sets.check_sizes, **fields)
        for name in BENCHMARKS
        if name in files
    }
    own: dict[str, list[str]] = {}
    for part in filter(None, sets.own.split(",")):
        name, equals, path = part.partition("=")
        if not equals or not name.replace("_", "").replace("-", "").isalnum() or name in BENCHMARKS:
            raise ConfigError(
                f"sets.own holds {part!r}; expected NAME=FILE with a name of letters, digits, - "
                "and _ that is none of the seven sets"
            )
        own.setdefault(name, []).append(path)
    found |= {name: benchmarks.read_set(name, paths, **fields) for name, paths in own.items()}
    if sets.addition:
        found["addition"] = addition.problems(
            sets.addition, held_out=True, seed=_ADDITION_SEED, digits=tuple(sets.addition_digits)
        )
    if not found:
        raise ConfigError(
            "no evaluation set is named; set --config.sets.dir=FOLDER, or single ones such as "
            "--config.sets.math500=FILE"
        )
    absent = [name for name in BENCHMARKS if name not in found]
    if absent and len(absent) < len(BENCHMARKS):
        log.warning("not among the sets: %s; the average is over the others", ", ".join(absent))
    return found
