"""docs/checkpoints.md shows what each fault prints: the messages are made anew and looked up.

After changing a message, run this file: a failure prints the row that the page needs.
"""

import json
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel

import checkpoints
from checkpoints import INDEX, SINGLE, copy_golden, edit_config, edit_tensors, shard_name, split
from saki_jax.models import hf
from saki_jax.models import tokenizer as tokenizers
from saki_jax.models.compatibility import check_pair
from saki_jax.models.config import PRESETS
from saki_jax.models.sharding import param_shardings

PAGE = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text()
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def _cut(folder: Path, keep: slice) -> None:
    file = folder / SINGLE
    file.write_bytes(file.read_bytes()[keep])


def _lost_shard(folder: Path) -> None:
    split(folder, 3)
    (folder / shard_name(2, 3)).unlink()


def _foreign_shard(folder: Path) -> None:
    split(folder, 2)
    edit_tensors(folder, lambda t: _without(t, "model.norm.weight"), shard_name(2, 2))


def _without(tensors: dict, *names: str) -> dict:
    return {name: values for name, values in tensors.items() if name not in names}


def _other_head(tensors: dict) -> dict:
    return tensors | {HEAD: tensors[EMBEDDING].astype(np.float32) + 0.25}


def _renamed(tensors: dict) -> dict:
    return {"language_model." + name: values for name, values in tensors.items()}


def _extra_layer(tensors: dict) -> dict:
    name = "model.layers.{}.mlp.up_proj.weight"
    return tensors | {name.format(2): tensors[name.format(1)]}


def _change(name: str, values: np.ndarray):
    return lambda tensors: tensors | {name: values}


# What was given (the row's first cell) -> how the folder gets there.
FAULTS = {
    "a folder that does not exist": lambda d: d.rename(d.parent / "elsewhere"),
    "no `config.json`": lambda d: (d / "config.json").unlink(),
    "a Git-LFS pointer for `config.json`": lambda d: (d / "config.json").write_text(
        checkpoints.LFS_POINTER
    ),
    "an unknown architecture": lambda d: edit_config(d, model_type="gemma3"),
    "another rope type": lambda d: edit_config(
        d, rope_parameters={"rope_type": "yarn", "rope_theta": 1e6}
    ),
    "no rope_theta anywhere": lambda d: edit_config(d, remove=("rope_parameters",)),
    "attention bias": lambda d: edit_config(d, attention_bias=True),
    "a sliding window": lambda d: edit_config(d, use_sliding_window=True),
    "quantised weights": lambda d: edit_config(d, quantization_config={"bits": 4}),
    "no safetensors files": lambda d: (d / SINGLE).rename(d / "pytorch_model.bin"),
    "a Git-LFS pointer for the weights": lambda d: (d / SINGLE).write_text(checkpoints.LFS_POINTER),
    "an empty file": lambda d: _cut(d, slice(0)),
    "a file cut one byte short": lambda d: _cut(d, slice(-1)),
    "a file cut in its header": lambda d: _cut(d, slice(100)),
    "something else under the name": lambda d: (d / SINGLE).write_text("<html>Not found</html>"),
    "an index that names a missing shard": _lost_shard,
    "a shard of another checkpoint": _foreign_shard,
    "an index without a map": lambda d: (d / INDEX).write_text("{}"),
    "a missing tensor": lambda d: edit_tensors(
        d, lambda t: _without(t, "model.layers.1.self_attn.q_norm.weight")
    ),
    "a layer more than the config says": lambda d: edit_tensors(d, _extra_layer),
    "a wrong shape": lambda d: edit_tensors(
        d, _change("model.norm.weight", np.ones(23, np.float32))
    ),
    "a wrong dtype": lambda d: edit_tensors(d, _change("model.norm.weight", np.ones(24, np.int8))),
    "untied, without a head": lambda d: edit_config(d, tie_word_embeddings=False),
    "tied, with another head": lambda d: edit_tensors(d, _other_head),
    "names with another prefix": lambda d: edit_tensors(d, _renamed),
}


def _assert_shown(given: str, printed: str) -> None:
    row = f"| {given} | {printed} |"
    assert row in PAGE.splitlines(), f"docs/checkpoints.md lacks this row:\n{row}"


@pytest.mark.parametrize("given", FAULTS)
def test_each_fault_of_a_folder_is_shown_as_it_is_printed(given, tmp_path):
    folder = copy_golden(tmp_path / "DIR")
    FAULTS[given](folder)
    with pytest.raises(hf.CheckpointError) as caught:
        hf.load(folder, dtype=jnp.float32)
    first = caught.value.problems[0]
    _assert_shown(given, first.replace(str(folder), "DIR").replace("|", r"\|"))


def _tokenizer(folder: Path, words: list[str]) -> tokenizers.Tokenizer:
    folder.mkdir()
    backend = Backend(WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": words[0]}))
    return tokenizers.load(folder)


TINY = PRESETS["tiny"]
ORDER = ["end", "a", "b", "c"]
# What was given -> (student's rows, teacher's rows, student's tokens, teacher's tokens)
PAIRS = {
    "heads of different width": (151936, 152064, ORDER, ORDER),
    "a tokenizer larger than the head": (3, 3, ORDER, ORDER),
    "different token maps": (64, 64, ORDER, ["end", "a", "c", "b"]),
}


@pytest.mark.parametrize("given", PAIRS)
def test_each_fault_of_a_pair_is_shown_as_it_is_printed(given, tmp_path):
    student_rows, teacher_rows, *words = PAIRS[given]
    pair = [_tokenizer(tmp_path / n, w) for n, w in zip(["STUDENT", "TEACHER"], words, strict=True)]
    with pytest.raises(tokenizers.TokenizerError) as caught:
        check_pair(
            replace(TINY, vocab_size=student_rows), replace(TINY, vocab_size=teacher_rows), *pair
        )
    _assert_shown(given, str(caught.value).replace(f"{tmp_path}/", ""))


def test_other_faults_are_shown_as_they_are_printed(tmp_path):
    from saki_jax.models.sharding import make_mesh

    with pytest.raises(ValueError, match="mesh") as caught:
        param_shardings(make_mesh(1, 1, 4), replace(TINY, num_heads=4, num_kv_heads=2))
    shown = str(caught.value).splitlines()[1].removeprefix("- ")
    _assert_shown("a mesh that does not divide the model", shown)
    config, params = hf.load(checkpoints.GOLDEN / "tied_2to1", dtype=jnp.float32)
    (tmp_path / "DIR").mkdir()
    (tmp_path / "DIR" / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError) as caught:
        hf.save(tmp_path / "DIR", config, params)
    _assert_shown("export to a folder in use", str(caught.value).replace(f"{tmp_path}/", ""))
