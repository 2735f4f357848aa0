"""Pairs of student and teacher that cannot be compared token by token."""

import json
from dataclasses import replace

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel

from saki_jax.models import tokenizer as tokenizers
from saki_jax.models.compatibility import check_pair
from saki_jax.models.config import PRESETS
from saki_jax.models.tokenizer import TokenizerError

TINY = PRESETS["tiny"]  # 64 rows


def _tokenizer(folder, words: list[str]) -> tokenizers.Tokenizer:
    folder.mkdir()
    backend = Backend(WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": words[0]}))
    return tokenizers.load(folder)


def test_equal_pairs_pass_whatever_else_differs(tmp_path):
    one, other = (_tokenizer(tmp_path / name, ["end", "a", "b"]) for name in ("s", "t"))
    check_pair(TINY, replace(TINY, hidden_size=64, num_layers=7), one, other)


def test_t08_heads_of_different_width_are_refused_with_both_numbers(tmp_path):
    one, other = (_tokenizer(tmp_path / name, ["end", "a", "b"]) for name in ("s", "t"))
    student, teacher = replace(TINY, vocab_size=151936), replace(TINY, vocab_size=152064)
    with pytest.raises(TokenizerError, match=r"151936 rows, the teacher's 152064"):
        check_pair(student, teacher, one, other)


@pytest.mark.parametrize("larger", ["s", "t"])
def test_a_tokenizer_larger_than_the_head_is_refused(tmp_path, larger):
    words = [f"w{i}" for i in range(65)]
    pair = [_tokenizer(tmp_path / name, words[: 65 if name == larger else 64]) for name in "st"]
    with pytest.raises(TokenizerError, match=f"{larger} has ids up to 64, the head only 64 rows"):
        check_pair(TINY, TINY, *pair)


def test_token_maps_that_differ_are_refused_with_a_token(tmp_path):
    one = _tokenizer(tmp_path / "s", ["end", "a", "b", "c"])
    other = _tokenizer(tmp_path / "t", ["end", "a", "c", "b"])
    with pytest.raises(TokenizerError, match=r"differ in 2 tokens .'b': 2 / 3"):
        check_pair(TINY, TINY, one, other)
