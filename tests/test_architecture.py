"""The import direction of the package, and what importing it must not do."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "saki_jax"

# A folder may import from itself and from those listed: never the other way round.
ALLOWED = {
    "models": set(),
    "data": {"models"},
    "rollout": {"models", "data"},
    "evals": {"rollout", "models", "data"},
    "train": {"evals", "rollout", "models", "data"},
}

# Files that carry the mathematics and stay free of frameworks: allowed top-level packages.
PURE = {
    "rollout/bridge.py": {
        "jax",
        "numpy",
        "jaxtyping",
        "typing",
        "collections",
        "functools",
        "math",
    },
    "rollout/coupling.py": {"jax", "numpy", "jaxtyping", "typing", "collections", "functools"},
    "rollout/keys.py": {"jax", "numpy", "jaxtyping", "enum", "collections", "functools"},
    "train/routing.py": {
        "jax",
        "numpy",
        "jaxtyping",
        "flax",
        "collections",
        "typing",
        "dataclasses",
    },
    "train/objective.py": {
        "jax",
        "numpy",
        "jaxtyping",
        "flax",
        "typing",
        "dataclasses",
        "collections",
    },
    "train/schedule.py": {"math", "numpy", "collections", "dataclasses", "typing"},
    "evals/score.py": {"numpy", "collections", "dataclasses", "typing", "math"},
    "evals/bootstrap.py": {"numpy", "collections", "dataclasses", "math", "zlib"},
    "evals/grade.py": set(sys.stdlib_module_names),
}


def imported_modules(path: Path) -> set[str]:
    """Absolute names of everything a file imports, wherever in the file."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write saki_jax.… in full"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def violations(folder: str, names: set[str]) -> set[str]:
    """The imports out of `folder` that point against the direction."""
    permitted = ALLOWED[folder] | {folder}
    return {
        name
        for name in names
        if name.startswith("saki_jax.") and name.split(".")[1] in set(ALLOWED) - permitted
    }


@pytest.mark.parametrize("folder", sorted(ALLOWED))
def test_imports_point_one_way(folder):
    for path in sorted((PACKAGE / folder).rglob("*.py")):
        assert not violations(folder, imported_modules(path)), path


def test_a_wrong_import_would_be_seen():
    assert violations("rollout", {"saki_jax.train.loop.run"}) == {"saki_jax.train.loop.run"}
    assert not violations("train", {"saki_jax.rollout.engine.make_rollout"})


@pytest.mark.parametrize("file", sorted(PURE))
def test_the_mathematics_is_free_of_frameworks(file):
    outside = {
        name
        for name in imported_modules(PACKAGE / file)
        if name.split(".")[0] not in PURE[file] | {"saki_jax"}
    }
    assert not outside


def test_j04_import_touches_no_device():
    code = (
        "import saki_jax, saki_jax.train.loop, jax; from jax._src import xla_bridge; "
        "assert not xla_bridge._backends, list(xla_bridge._backends)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
