"""`python -m saki_jax.export`: what a run trained comes out as a folder that can go in again."""

import jax
import numpy as np
import pytest

from eval_toys import save_model
from saki_jax.evals.checkpoint import SubjectError
from saki_jax.export import export, main
from saki_jax.models import hf
from saki_jax.train import loop
from train_runs import small_config


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("export")
    models = [save_model(folder / name, seed) for seed, name in enumerate(("student", "teacher"))]
    loop.run(small_config(models, steps=2, eval__teacher=False), folder / "run")
    return folder / "run"


def test_the_folder_holds_the_trained_masters(run, tmp_path):
    config, params = hf.load(export(run, tmp_path / "out", dtype="float32"), dtype="float32")
    start_config, start = hf.load(run.parent / "student", dtype="float32")
    assert config == start_config
    moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), params, start)
    assert max(jax.tree.leaves(moved)) > 0
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def test_bfloat16_rounds_once(run, tmp_path):
    _, exact = hf.load(export(run, tmp_path / "a", dtype="float32"), dtype="float32")
    _, short = hf.load(export(run, tmp_path / "b"), dtype="bfloat16")
    same = jax.tree.map(lambda a, b: bool((a.astype("bfloat16") == b).all()), exact, short)
    assert all(jax.tree.leaves(same))


def test_nothing_is_overwritten_and_errors_are_words(run, tmp_path):
    export(run, tmp_path / "out")
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    with pytest.raises(SystemExit, match="exists and is not empty"):
        main([str(run), str(tmp_path / "out")])
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before
    with pytest.raises(SubjectError, match="no complete checkpoint of step 7, only of"):
        export(run, tmp_path / "other", step=7)
    with pytest.raises(SubjectError, match="already"):
        export(run.parent / "student", tmp_path / "other")
    assert not (tmp_path / "other").exists()
