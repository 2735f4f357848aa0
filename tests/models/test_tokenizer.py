"""Tokenizer folders: ids, end ids, decoding, and what is refused."""

import logging

import pytest

from saki_jax.models import tokenizer as tokenizers
from saki_jax.models.tokenizer import TokenizerError, check_pair, check_vocabularies, end_ids
from tokenizer_kit import (
    BYTES,
    END_OF_TEXT,
    IM_END,
    byte_id,
    save_qwen3_like,
    save_words,
    write_json,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_qwen3_like(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def tokenizer(folder):
    return tokenizers.load(folder)


def test_encode_and_decode_are_inverse(tokenizer):
    text = "a {b} 50% \\frac{1}{2} 你好 😀\n"
    ids = tokenizer.encode(text)
    assert ids == [byte_id(b) for b in text.encode()]
    assert tokenizer.decode(ids) == text
    assert tokenizer.size == BYTES + 5
    assert tokenizer.pad_id == END_OF_TEXT


def test_t01_union_of_the_files_is_the_default_and_is_logged(folder, caplog):
    write_json(folder / "config.json", eos_token_id=END_OF_TEXT)
    with caplog.at_level(logging.INFO):
        assert end_ids([folder]) == (END_OF_TEXT, IM_END)
    assert "disagree" in caplog.text
    assert "config.json" in caplog.text
    assert "tokenizer_config.json" in caplog.text


def test_t01_a_configured_set_is_used_as_it_is(folder):
    assert end_ids([folder], [7, IM_END, 7]) == (7, IM_END)


def test_t01_lists_of_both_checkpoints_are_joined(folder, tmp_path):
    write_json(tmp_path / "generation_config.json", eos_token_id=[3, 4])
    assert end_ids([folder, tmp_path]) == (3, 4, END_OF_TEXT, IM_END)


def test_t01_no_end_id_is_refused(tmp_path):
    write_json(tmp_path / "config.json", eos_token_id=None)
    with pytest.raises(TokenizerError, match=r"no file .* names an end id; set rollout.end_ids"):
        end_ids([tmp_path])


def test_t01_an_end_id_that_is_no_id_is_refused(tmp_path):
    write_json(tmp_path / "config.json", eos_token_id="<|im_end|>")
    with pytest.raises(TokenizerError, match=r"config.json: eos_token_id is '<\|im_end\|>'"):
        end_ids([tmp_path])


def test_t07_ids_without_a_token_decode_to_nothing_and_are_counted(tokenizer):
    ids = [byte_id(ord("4")), BYTES + 5, byte_id(ord("2")), 151700, IM_END]
    assert tokenizer.decode(ids) == "42"
    assert tokenizer.count_unknown(ids) == 2


def test_t07_think_tags_stay_in_the_text(tokenizer):
    assert tokenizer.decode(tokenizer.encode("<think>x</think>y")) == "<think>x</think>y"


def test_t08_heads_of_different_width_are_refused(tokenizer):
    with pytest.raises(TokenizerError, match=r"151936.*152064"):
        check_vocabularies(tokenizer, 151936, 152064)
    check_vocabularies(tokenizer, 151936, 151936)


def test_a_tokenizer_larger_than_the_head_is_refused(tokenizer):
    check_vocabularies(tokenizer, BYTES + 5, BYTES + 5)
    with pytest.raises(TokenizerError, match=r"ids up to 260, the head only 260 rows"):
        check_vocabularies(tokenizer, BYTES + 4, BYTES + 4)


def test_different_token_maps_are_refused(tmp_path):
    one = tokenizers.load(save_words(tmp_path / "a", ["a", "b", "end"], eos="end"))
    same = tokenizers.load(save_words(tmp_path / "c", ["a", "b", "end"], eos="end"))
    other = tokenizers.load(save_words(tmp_path / "b", ["b", "a", "end"], eos="end"))
    check_pair(one, same)
    with pytest.raises(TokenizerError, match=r"differ in 2 tokens \('a': 0 / 1, 'b': 1 / 0\)"):
        check_pair(one, other)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(TokenizerError, match=r"tokenizer.json is missing; expected a local"):
        tokenizers.load(tmp_path)


@pytest.mark.parametrize("content", ['{"version": ', "[]", '{"added_tokens": [], "model": {}}'])
def test_a_damaged_file_is_named(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(TokenizerError, match=r"tokenizer.json .*cannot be read as a tokenizer"):
        tokenizers.load(tmp_path)


def test_a_damaged_config_is_named(tmp_path):
    save_words(tmp_path, ["a", "end"], eos="end")
    (tmp_path / "tokenizer_config.json").write_text("{half")
    with pytest.raises(TokenizerError, match=r"tokenizer_config.json .*cannot be read"):
        tokenizers.load(tmp_path)


def test_a_git_lfs_pointer_is_named(tmp_path):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 11\n"
    (tmp_path / "tokenizer.json").write_text(pointer)
    with pytest.raises(TokenizerError, match="Git-LFS pointer"):
        tokenizers.load(tmp_path)


def test_a_folder_without_a_template_says_so(tmp_path):
    plain = tokenizers.load(save_words(tmp_path, ["a", "end"], eos="end"))
    with pytest.raises(TokenizerError, match=r"has no chat template; use data.template='raw'"):
        plain.chat("a", enable_thinking=False)
