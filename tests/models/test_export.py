"""Checkpoint folders out: back again unchanged, all or nothing, never over something."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from checkpoints import GOLDEN, copy_golden, edit_config
from saki_jax.models import export, hf
from saki_jax.models.config import PRESETS
from saki_jax.models.qwen3 import init_params
from saki_jax.models.sharding import make_mesh

VARIANTS = ["tied_2to1", "untied_4to1", "square_1to1", "llama_3to1"]


@pytest.fixture
def loaded():
    return hf.load(GOLDEN / "tied_2to1", dtype=jnp.float32)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_out_and_back_is_the_same_checkpoint(tmp_path, variant, dtype):
    config, params = hf.load(GOLDEN / variant, dtype=dtype)
    hf.save(tmp_path / "out", config, params, dtype=dtype)
    again, back = hf.load(tmp_path / "out", dtype=dtype)
    assert again == config
    for ours, theirs in zip(jax.tree.leaves(back), jax.tree.leaves(params), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)
    # An independent reader finds the original tensors, name by name.
    written = load_file(tmp_path / "out" / "model.safetensors")
    original = load_file(GOLDEN / variant / "model.safetensors")
    assert written.keys() == original.keys()
    for name, values in original.items():
        np.testing.assert_array_equal(written[name], values.astype(written[name].dtype))


def test_sharded_parameters_are_written_whole(tmp_path, eight_devices):
    config = PRESETS["tiny"]
    sharded = init_params(config, jax.random.key(0), make_mesh(2, 2, 2, devices=eight_devices))
    hf.save(tmp_path / "out", config, sharded, dtype=jnp.float32)
    _, back = hf.load(tmp_path / "out", dtype=jnp.float32)
    for ours, theirs in zip(jax.tree.leaves(back), jax.tree.leaves(sharded), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_nothing_is_overwritten(tmp_path, loaded):
    target = tmp_path / "out"
    target.mkdir()
    hf.save(target, *loaded, dtype=jnp.float32)  # an empty folder may be filled
    before = (target / "model.safetensors").read_bytes()
    with pytest.raises(FileExistsError, match="exists and is not empty"):
        hf.save(target, *loaded, dtype=jnp.bfloat16)
    assert (target / "model.safetensors").read_bytes() == before
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FileExistsError):
        hf.save(tmp_path / "file", *loaded, dtype=jnp.bfloat16)


def test_a_failure_leaves_nothing_behind(tmp_path, loaded, monkeypatch):
    def fail(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(export, "_write_config", fail)
    with pytest.raises(OSError, match="No space left"):
        hf.save(tmp_path / "out", *loaded, dtype=jnp.float32)
    assert list(tmp_path.iterdir()) == []


def test_tokenizer_generation_config_and_special_ids_are_taken_over(tmp_path, loaded):
    source = copy_golden(tmp_path / "source")
    edit_config(source, eos_token_id=[5, 6], bos_token_id=4, pad_token_id=None)
    kept = {
        "tokenizer.json": "{}",
        "tokenizer_config.json": '{"eos_token": "x"}',
        "chat_template.jinja": "{{ x }}",
        "generation_config.json": '{"eos_token_id": [5, 6]}',
    }
    for name, text in kept.items():
        (source / name).write_text(text)
    (source / "secret.txt").write_text("not ours to copy")
    hf.save(tmp_path / "out", *loaded, dtype=jnp.float32, tokenizer_from=source)
    written = {f.name for f in (tmp_path / "out").iterdir()}
    assert written == {*kept, "config.json", "model.safetensors"}
    for name, text in kept.items():
        assert (tmp_path / "out" / name).read_text() == text
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["eos_token_id"], config["bos_token_id"]) == ([5, 6], 4)
    assert config["pad_token_id"] is None
    assert config["dtype"] == "float32"


def test_float16_that_is_too_narrow_is_refused(tmp_path, loaded):
    config, params = loaded
    params["norm"]["scale"] = params["norm"]["scale"].at[0].set(1e6)
    with pytest.raises(ValueError, match=r"model.norm.weight holds values up to 1e\+06"):
        hf.save(tmp_path / "out", config, params, dtype=jnp.float16)
    assert list(tmp_path.iterdir()) == []


def test_wrong_arguments_are_told(tmp_path, loaded):
    config, params = loaded
    with pytest.raises(ValueError, match="cannot write int8"):
        hf.save(tmp_path / "out", config, params, dtype=jnp.int8)
    with pytest.raises(FileNotFoundError, match="the one that holds the tokenizer"):
        hf.save(tmp_path / "out", config, params, tokenizer_from=tmp_path / "none")
    params["norm"]["scale"] = params["norm"]["scale"][:-1]
    with pytest.raises(ValueError, match=r"norm.scale: given \(23,\), expected \(24,\)"):
        hf.save(tmp_path / "out", config, params)
