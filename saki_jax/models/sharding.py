"""One mesh, one table of logical axes: how parameters, caches and batches lie on the devices."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from saki_jax.models.config import Qwen3Config
from saki_jax.models.parameters import describe, nest

MESH_AXES = ("data", "fsdp", "tensor")

# The only place that says which dimension lies on which mesh axis. An axis not named here, or
# None, is replicated. `embed` is the weights' width: activations keep theirs whole.
RULES: dict[str, str | tuple[str, ...]] = {
    "batch": ("data", "fsdp"),
    "embed": "fsdp",
    "vocab": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "feed_forward": "tensor",
}


def make_mesh(data: int, fsdp: int, tensor: int, devices: Sequence | None = None) -> Mesh:
    """A (data, fsdp, tensor) mesh with Auto axes; one size may be -1, "what is left".

    Raises:
      ValueError: the sizes do not fit the number of devices; both are named.
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes = [data, fsdp, tensor]
    if sizes.count(-1) == 1:
        rest = math.prod(size for size in sizes if size != -1)
        sizes[sizes.index(-1)] = len(devices) // rest
    wanted = math.prod(sizes)
    if min(sizes) < 1 or wanted > len(devices):
        raise ValueError(
            f"a mesh of data {data} x fsdp {fsdp} x tensor {tensor} needs {abs(wanted)} devices, "
            f"there are {len(devices)}; choose sizes whose product is at most {len(devices)}"
        )
    return jax.make_mesh(
        tuple(sizes), MESH_AXES, axis_types=(AxisType.Auto,) * 3, devices=devices[:wanted]
    )


def spec(*axes: str | None) -> PartitionSpec:
    """The mesh axes of an array whose dimensions carry these logical names."""
    return PartitionSpec(*(RULES[axis] if axis else None for axis in axes))


def check_divides(mesh: Mesh, config: Qwen3Config) -> None:
    """Refuses a mesh over which the model's dimensions cannot be laid evenly.

    Raises:
      ValueError: names every dimension with its size and the mesh axis with its size.
    """
    dimensions = {
        "hidden size": ("embed", config.hidden_size),
        "vocabulary": ("vocab", config.vocab_size),
        "query heads": ("heads", config.num_heads),
        "key/value heads": ("kv_heads", config.num_kv_heads),
        "intermediate size": ("feed_forward", config.intermediate_size),
    }
    problems = []
    for name, (axis, size) in dimensions.items():
        over = RULES[axis]
        if size % mesh.shape[over]:
            problems.append(
                f"- {name} {size} does not divide by mesh axis {over!r} of size {mesh.shape[over]}"
            )
    if problems:
        raise ValueError(
            "the model does not fit this mesh:\n"
            + "\n".join(problems)
            + "\nchoose axis sizes that divide these dimensions"
        )


def check_batch(mesh: Mesh, rows: int, what: str = "batch rows") -> None:
    """Refuses a number of rows that the devices of ("data", "fsdp") cannot share evenly.

    Raises:
      ValueError: names the rows and the devices.
    """
    shards = mesh.shape["data"] * mesh.shape["fsdp"]
    if rows % shards:
        raise ValueError(
            f"{rows} {what} do not divide over data {mesh.shape['data']} x fsdp "
            f"{mesh.shape['fsdp']} = {shards} devices; choose a multiple of {shards}"
        )


def param_shardings(mesh: Mesh, config: Qwen3Config) -> dict[str, Any]:
    """A NamedSharding for each parameter, in the tree of ``init_params``.

    Raises:
      ValueError: a dimension does not divide by its mesh axis (see `check_divides`).
    """
    check_divides(mesh, config)
    return nest({p.path: NamedSharding(mesh, spec(*p.axes)) for p in describe(config)})


def state_shardings(mesh: Mesh, config: Qwen3Config, tree: Any) -> Any:
    """Shardings for a tree that holds copies of the parameter tree (optimizer moments).

    A leaf whose path ends like a parameter's and which has its shape lies as that parameter does;
    every other leaf (counters, scalars) is replicated.
    """
    check_divides(mesh, config)
    known = {p.path: p for p in describe(config)}
    replicated = NamedSharding(mesh, PartitionSpec())

    def place(path: tuple, leaf: Any) -> NamedSharding:
        names = tuple(str(getattr(k, "key", getattr(k, "name", k))) for k in path)
        for start in range(len(names)):
            parameter = known.get(names[start:])
            if parameter is not None and tuple(leaf.shape) == parameter.shape:
                return NamedSharding(mesh, spec(*parameter.axes))
        return replicated

    return jax.tree_util.tree_map_with_path(place, tree)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows over ("data", "fsdp"), all other dimensions whole; for arrays of any rank >= 1."""
    return NamedSharding(mesh, spec("batch"))


def cache_shardings(mesh: Mesh, config: Qwen3Config) -> tuple:
    """Shardings of ``init_cache``'s result: rows over data and fsdp, heads over tensor."""
    check_divides(mesh, config)
    one = NamedSharding(mesh, spec("batch", None, "kv_heads", None))
    return tuple((one, one) for _ in range(config.num_layers))


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Says how an intermediate result lies on the mesh in context; without one, returns it.

    A dimension that its mesh axes do not divide is left to the compiler: this is about speed, and
    the values are the same.
    """
    mesh = _mesh_in_context()
    if mesh is None:
        return x
    kept = []
    for size, over in zip(x.shape, spec(*axes), strict=True):
        kept.append(over if size % _shards(mesh, over) == 0 else None)
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*kept))


def per_shard(f: Callable, axes_in: tuple[tuple, ...], axes_out: tuple) -> Callable:
    """``f`` as each device of the mesh in context computes it on its own part of the arrays.

    For functions that are independent along the named dimensions but written with loops that the
    compiler could not split. Without a mesh this is ``f``. A logical axis that does not divide some
    array is computed whole on each device.

    Args:
      f: takes arrays and returns one.
      axes_in: the logical axes of each argument's dimensions.
      axes_out: those of the result.
    """

    def run(*arrays: jax.Array) -> jax.Array:
        mesh = _mesh_in_context()
        if mesh is None:
            return f(*arrays)
        whole = {
            axis
            for x, axes in zip(arrays, axes_in, strict=True)
            for size, axis in zip(x.shape, axes, strict=True)
            if axis and size % _shards(mesh, RULES[axis])
        }
        *specs, out = (
            spec(*(None if axis in whole else axis for axis in axes))
            for axes in (*axes_in, axes_out)
        )
        # No claim is made about what is equal on several devices: loops would have to repeat it.
        split = jax.shard_map(f, in_specs=tuple(specs), out_specs=out, check_vma=False)
        return split(*arrays)

    return run


def _mesh_in_context() -> jax.sharding.AbstractMesh | None:
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty or not set(MESH_AXES) <= set(mesh.axis_names) else mesh


def _shards(mesh: jax.sharding.AbstractMesh, over: str | tuple[str, ...] | None) -> int:
    names = (over,) if isinstance(over, str) else (over or ())
    return math.prod(mesh.shape[name] for name in names)
