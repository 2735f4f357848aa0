"""Checkpoint folders in: layouts, dtypes, tied heads, shards, and every fault in words."""

import json
import logging

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import checkpoints
from checkpoints import INDEX, SINGLE, copy_golden, edit_config, edit_tensors, shard_name, split
from saki_jax.models import hf
from saki_jax.models.qwen3 import language_model
from saki_jax.models.sharding import make_mesh, param_shardings

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture
def tied(tmp_path):
    return copy_golden(tmp_path / "tied")


@pytest.fixture
def untied(tmp_path):
    return copy_golden(tmp_path / "untied", "untied_4to1")


def same(ours: dict, theirs: dict) -> bool:
    """Equal to the bit, dtype included."""
    leaves = zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
    return all(a.dtype == b.dtype and (a == b).all() for a, b in leaves)


def problems(folder) -> list[str]:
    """What `load` finds wrong; no weight may have been placed by then."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf, "_place", lambda *_: pytest.fail("a weight was put on a device"))
        with pytest.raises(hf.CheckpointError) as caught:
            hf.load(folder, dtype=jnp.float32)
    assert str(folder) in str(caught.value)
    return caught.value.problems


def test_values_arrive_where_they_belong(tied):
    config, params = hf.load(tied, dtype=jnp.float32)
    stored = load_file(tied / SINGLE)
    np.testing.assert_array_equal(
        params["layers"]["1"]["mlp"]["down_proj"]["kernel"],
        stored["model.layers.1.mlp.down_proj.weight"].astype(np.float32).T,
    )
    np.testing.assert_array_equal(
        params["embed_tokens"]["embedding"], stored[EMBEDDING].astype(np.float32)
    )
    assert config.num_layers == 2
    assert "lm_head" not in params


@pytest.mark.parametrize("stored", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("wanted", ["bfloat16", "float16", "float32"])
def test_each_dtype_is_cast_once_from_the_file(tied, stored, wanted):
    original = load_file(tied / SINGLE)
    cast = {k: v.astype(np.float32).astype(np.dtype(stored)) for k, v in original.items()}
    edit_tensors(tied, lambda _: cast)
    _, params = hf.load(tied, dtype=wanted)
    ours = params["layers"]["0"]["self_attn"]["k_proj"]["kernel"]
    expected = cast["model.layers.0.self_attn.k_proj.weight"].astype(np.dtype(wanted)).T
    assert ours.dtype == wanted
    np.testing.assert_array_equal(
        np.asarray(ours).view(np.uint8), np.ascontiguousarray(expected).view(np.uint8)
    )


def test_w06_bfloat16_bits_are_kept(tied):
    # 1.5, -2.0, 3.25, 0.0 by their bytes; then a value that float16 cannot hold.
    bits = np.frombuffer(bytes.fromhex("C03F00C050400000"), ml_dtypes.bfloat16)
    huge = np.array([1e38, 1e-38, -0.0, np.nan], ml_dtypes.bfloat16)
    row = np.concatenate([bits, huge])

    def change(tensors):
        tensors[EMBEDDING] = tensors[EMBEDDING].copy()
        tensors[EMBEDDING][3, :8] = row

    edit_tensors(tied, change)
    _, params = hf.load(tied, dtype=jnp.bfloat16)
    ours = np.asarray(params["embed_tokens"]["embedding"][3, :8])
    assert ours.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(ours.view(np.uint16), row.view(np.uint16))
    np.testing.assert_array_equal(ours[:4].astype(np.float32), [1.5, -2.0, 3.25, 0.0])


@pytest.mark.parametrize("count", [2, 3])
def test_shards_with_an_index_equal_the_single_file(tied, count):
    _, expected = hf.load(tied, dtype=jnp.float32)
    split(tied, count)
    _, params = hf.load(tied, dtype=jnp.float32)
    assert same(params, expected)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (8, 1, 1), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("variant", ["tied_2to1", "untied_4to1"])
def test_each_device_gets_its_own_part(tmp_path, eight_devices, variant, sizes):
    folder = copy_golden(tmp_path / "checkpoint", variant)
    _pad_vocabulary(folder, 64)
    config, expected = hf.load(folder, dtype=jnp.bfloat16)
    mesh = make_mesh(*sizes, devices=eight_devices)
    _, params = hf.load(folder, dtype=jnp.bfloat16, mesh=mesh)
    assert same(params, expected)
    shardings = param_shardings(mesh, config)
    for leaf, sharding in zip(jax.tree.leaves(params), jax.tree.leaves(shardings), strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


def _pad_vocabulary(folder, rows: int) -> None:
    """61 rows do not divide by anything; real vocabularies are padded likewise."""

    def change(tensors):
        for name in {EMBEDDING, HEAD} & tensors.keys():
            tensors[name] = np.pad(tensors[name], ((0, rows - len(tensors[name])), (0, 0)))

    edit_tensors(folder, change)
    edit_config(folder, vocab_size=rows)


def test_w02_a_surplus_head_equal_to_the_embedding_is_dropped(tied):
    _, expected = hf.load(tied, dtype=jnp.float32)

    def change(tensors):
        tensors[HEAD] = tensors[EMBEDDING].astype(np.float32)  # another dtype, the same values

    edit_tensors(tied, change)
    _, params = hf.load(tied, dtype=jnp.float32)
    assert same(params, expected)


@pytest.mark.parametrize("row", [0, 60])
def test_w02_a_surplus_head_of_other_values_is_refused(tied, row):
    def change(tensors):
        tensors[HEAD] = tensors[EMBEDDING].astype(np.float32)
        tensors[HEAD][row, 2] += 0.25

    edit_tensors(tied, change)
    (problem,) = problems(tied)
    assert HEAD in problem
    assert EMBEDDING in problem
    assert "0.25" in problem


def test_w02_a_nan_in_one_of_the_two_is_a_difference(tied):
    def change(tensors):
        tensors[HEAD] = tensors[EMBEDDING].copy()
        tensors[HEAD][1, 1] = np.nan

    edit_tensors(tied, change)
    assert "by up to nan" in problems(tied)[0]


def test_w03_an_untied_config_without_a_head_is_refused(untied):
    edit_tensors(untied, lambda tensors: {k: v for k, v in tensors.items() if k != HEAD})
    (problem,) = problems(untied)
    assert HEAD in problem
    assert "tie_word_embeddings" in problem
    assert SINGLE in problem


def test_w04_a_missing_shard_is_named_and_no_other(tied):
    split(tied, 3)
    (tied / shard_name(2, 3)).unlink()
    (problem,) = problems(tied)
    assert shard_name(2, 3) in problem
    assert shard_name(1, 3) not in problem
    assert "missing" in problem


def test_w05_a_stray_file_is_ignored_and_logged(tied, caplog):
    split(tied, 2)
    _, expected = hf.load(tied, dtype=jnp.float32)
    save_file({"model.norm.weight": np.full(24, 7.0, np.float32)}, tied / "old.safetensors")
    with caplog.at_level(logging.INFO):
        _, params = hf.load(tied, dtype=jnp.float32)
    assert same(params, expected)
    assert "old.safetensors is ignored" in caplog.text


def test_w05_a_tensor_that_the_index_places_elsewhere_is_ignored(tied, caplog):
    split(tied, 2)
    _, expected = hf.load(tied, dtype=jnp.float32)

    def change(tensors):
        tensors["model.norm.weight"] = np.full(24, 7.0, np.float32)

    edit_tensors(tied, change, shard_name(1, 2))
    with caplog.at_level(logging.INFO):
        _, params = hf.load(tied, dtype=jnp.float32)
    assert same(params, expected)
    assert "model.norm.weight" in caplog.text


@pytest.mark.parametrize("file", [SINGLE, shard_name(2, 2)])
@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (lambda whole: checkpoints.LFS_POINTER.encode(), "Git-LFS pointer"),
        (lambda whole: b"", "incomplete"),
        (lambda whole: whole[:-1], "incomplete"),
        (lambda whole: whole[: len(whole) // 2], "incomplete"),
        (lambda whole: whole[:100], "incomplete"),
        (lambda whole: whole[:5], "incomplete"),
        (lambda whole: whole + b"\0", "damaged"),
        (lambda whole: whole[:8] + b"#" + whole[9:], "damaged header"),
        (lambda whole: whole.replace(b"BF16", b"F32 ", 1), "has dtype F32 ;"),
        (lambda whole: b"<html>Not found, sorry.</html>", "no safetensors file"),
    ],
)
def test_w07_a_file_that_is_not_whole_is_named_with_the_reason(tied, file, damage, word):
    if file != SINGLE:
        split(tied, 2)
    path = tied / file
    path.write_bytes(damage(path.read_bytes()))
    found = problems(tied)
    assert any(str(path) in problem for problem in found)
    with pytest.raises(hf.CheckpointError, match=word):
        hf.load(tied)


def test_w07_a_config_that_is_a_pointer(tied):
    (tied / "config.json").write_text(checkpoints.LFS_POINTER)
    (problem,) = problems(tied)
    assert "config.json is a Git-LFS pointer" in problem


def test_w08_extra_missing_and_misshapen_tensors_stand_in_one_message(tied):
    extra, missing = "model.layers.2.mlp.up_proj.weight", "model.layers.1.self_attn.q_norm.weight"

    def change(tensors):
        tensors[extra] = tensors["model.layers.1.mlp.up_proj.weight"]
        del tensors[missing]
        tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1]
        tensors["model.layers.0.mlp.up_proj.weight"] = np.zeros((40, 24), np.int8)

    edit_tensors(tied, change)
    found = problems(tied)
    assert len(found) == 4
    text = "\n".join(found)
    assert f"no tensor {missing} of shape (16,)" in text
    assert extra in text
    assert "num_hidden_layers = 2" in text
    assert "model.norm.weight has shape (23,), config.json asks for (24,)" in text
    assert "dtype I8" in text


@pytest.mark.parametrize("prefix", ["", "language_model.model.", "model.language_model."])
def test_w08_another_prefix_is_recognised(tied, prefix):
    edit_tensors(tied, lambda t: {prefix + name.removeprefix("model."): v for name, v in t.items()})
    assert repr(prefix + "norm.weight") in problems(tied)[0]


def test_w08_a_llama_config_over_qwen_files_lists_the_norms(tied):
    edit_config(tied, model_type="llama", architectures=["LlamaForCausalLM"])
    found = problems(tied)
    assert len(found) == 4  # q_norm and k_norm of two layers
    assert all("Llama (no q/k norm)" in problem for problem in found)


def test_config_and_file_problems_come_together(tied):
    edit_config(tied, attention_bias=True)
    (tied / SINGLE).write_bytes(b"")
    text = "\n".join(problems(tied))
    assert "attention_bias" in text
    assert "incomplete" in text


def test_rotary_frequencies_of_old_llama_files_are_passed_over(tied):
    def change(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)

    edit_tensors(tied, change)
    hf.load(tied)


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ("[]", "not a JSON object"),
        ("{", "not readable as JSON"),
        ("{}", "no weight_map"),
        (json.dumps({"weight_map": {EMBEDDING: "../elsewhere.safetensors"}}), "plain file names"),
        (json.dumps({"weight_map": {EMBEDDING: 3}}), "plain file names"),
    ],
)
def test_an_unusable_index_is_told(tied, index, words):
    (tied / INDEX).write_text(index)
    assert words in problems(tied)[0]


def test_other_formats_and_places_are_told(tied, tmp_path):
    (tied / SINGLE).rename(tied / "pytorch_model.bin")
    assert "pytorch_model.bin" in problems(tied)[0]
    assert "not a folder" in problems(tmp_path / "nowhere")[0]
    (tied / "config.json").unlink()
    assert any("config.json is missing" in problem for problem in problems(tied))


def test_w09_a_square_matrix_is_transposed(tmp_path):
    # hidden 4, two heads of two: q_proj is square, so no shape check can see a forgotten W^T.
    folder = copy_golden(tmp_path / "square", "square_1to1")

    def change(tensors):
        weight = np.zeros((32, 32), np.float32)
        weight[0, 1] = 1
        tensors["model.layers.0.self_attn.q_proj.weight"] = weight

    edit_tensors(folder, change)
    _, params = hf.load(folder, dtype=jnp.float32)
    kernel = params["layers"]["0"]["self_attn"]["q_proj"]["kernel"]
    one, other = jnp.eye(32)[1], jnp.eye(32)[0]
    np.testing.assert_array_equal(one @ kernel, other)
    np.testing.assert_array_equal(other @ kernel, jnp.zeros(32))


def test_w01_tied_files_without_a_head_load_and_run(tied):
    assert HEAD not in load_file(tied / SINGLE)
    config, params = hf.load(tied, dtype=jnp.float32)
    hidden = jnp.ones((1, 24))
    np.testing.assert_allclose(
        language_model(config).logits(params, hidden),
        hidden @ params["embed_tokens"]["embedding"].T,
        rtol=1e-6,
    )


def test_j11_loaded_parameters_can_be_donated(tied):
    _, params = hf.load(tied, dtype=jnp.float32)
    _, again = hf.load(tied, dtype=jnp.float32)
    halved = jax.jit(lambda p: jax.tree.map(lambda x: x / 2, p), donate_argnums=0)(params)
    for ours, theirs in zip(jax.tree.leaves(halved), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(ours, theirs / 2)


def test_read_config_alone(tied):
    assert hf.read_config(tied) == hf.load(tied)[0]
    edit_config(tied, remove=("rope_parameters",))
    with pytest.raises(hf.CheckpointError, match="rope_theta is missing"):
        hf.read_config(tied)
