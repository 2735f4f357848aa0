"""Two tiny random checkpoints of the addition task, made once a session."""

import os
from pathlib import Path

import jax
import pytest

from saki_jax.data import addition
from saki_jax.models import hf
from saki_jax.models.config import Qwen3Config
from saki_jax.models.qwen3 import init_params


def tiny_config(hidden_size: int = 32) -> Qwen3Config:
    return Qwen3Config(
        # Two rows more than tokens, so that the head divides over two devices.
        vocab_size=len(addition.TOKENS) + len(addition.TOKENS) % 2,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        initializer_range=0.3,  # far from uniform, so that corrections happen
    )


def write_checkpoint(path: Path, seed: int, hidden_size: int = 32) -> Path:
    config = tiny_config(hidden_size)
    addition.save_tokenizer(path / "tokenizer")
    params = init_params(config, jax.random.key(seed))
    return hf.save(
        path / "model", config, params, dtype="float32", tokenizer_from=path / "tokenizer"
    )


@pytest.fixture(scope="session", autouse=True)
def compile_once(tmp_path_factory):
    """Programs that several runs ask for are compiled once, by all workers together."""
    folder = tmp_path_factory.getbasetemp()
    if os.environ.get("PYTEST_XDIST_WORKER"):
        folder = folder.parent
    jax.config.update("jax_compilation_cache_dir", str(folder / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    yield
    jax.config.update("jax_compilation_cache_dir", None)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory) -> tuple[Path, Path]:
    """(student, teacher) folders."""
    root = tmp_path_factory.mktemp("checkpoints")
    return write_checkpoint(root / "student", 0), write_checkpoint(root / "teacher", 1)
