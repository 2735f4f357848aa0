"""The one description of the parameters, read off the module.

Shapes, initialisation, shardings and the names in a checkpoint all follow from it: the module's
attributes bear the names that Hugging Face files use, and each variable says its logical axes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from flax import nnx

from saki_jax.models.config import Qwen3Config

Path = tuple[str, ...]


@dataclass(frozen=True)
class Parameter:
    """One array of the model.

    Attributes:
      path: keys in the nested dict of parameters.
      shape: as held here; matrices are [in, out].
      axes: the logical axis of each dimension, None for one that is never split.
    """

    path: Path
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]

    @property
    def transposed(self) -> bool:
        """Whether the checkpoint holds [out, in], as torch's linear layers do."""
        return self.path[-1] == "kernel"

    @property
    def hf_name(self) -> str:
        """The tensor's name in a Hugging Face checkpoint."""
        prefix = () if self.path[0] == "lm_head" else ("model",)
        return ".".join((*prefix, *self.path[:-1], "weight"))

    @property
    def hf_shape(self) -> tuple[int, ...]:
        """The tensor's shape in a Hugging Face checkpoint."""
        return self.shape[::-1] if self.transposed else self.shape


@lru_cache(maxsize=32)
def describe(config: Qwen3Config) -> tuple[Parameter, ...]:
    """Every parameter of the model, in the order of the tree."""
    from saki_jax.models.qwen3 import abstract_module  # that module shards by this table

    _, state = nnx.split(abstract_module(config))
    return tuple(
        Parameter(path, tuple(variable.shape), variable.axes)
        for path, variable in flat_variables(state).items()
    )


def flat_variables(state: nnx.State) -> dict[Path, nnx.Variable]:
    """The module's variables by path, list positions as strings, in the order of nnx."""
    return {
        tuple(str(key) for key in path): variable for path, variable in nnx.to_flat_state(state)
    }


def nest(flat: Mapping[Path, Any]) -> dict[str, Any]:
    """{("a", "b"): x} -> {"a": {"b": x}}."""
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = value
    return tree


def lookup(tree: Mapping[str, Any], path: Path) -> Any:
    """The leaf of a nested dict under a path."""
    for key in path:
        tree = tree[key]
    return tree
