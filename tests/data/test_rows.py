"""Rows of JSON lines, JSON and parquet files."""

import json

import pyarrow
import pytest
from pyarrow import parquet

from saki_jax.data.prompts import DataError, read_jsonl
from saki_jax.data.rows import read_rows


def test_numbers_keep_their_digits(tmp_path):
    long = "3" * 60
    (tmp_path / "a.jsonl").write_text(f'{{"a": 27.0, "b": {long}, "c": 1e5}}\n')
    (tmp_path / "b.json").write_text(f'[{{"a": 27.0, "b": {long}, "c": 1e5}}]')
    for name in ("a.jsonl", "b.json"):
        ((_, row),) = read_rows(tmp_path / name)
        assert row == {"a": "27.0", "b": long, "c": "1e5"}


@pytest.mark.parametrize(
    "document",
    [
        [{"problem": "p", "answer": "1"}, {"problem": "q", "answer": "2"}],
        {"version": 1, "data": [{"problem": "p", "answer": "1"}, {"problem": "q", "answer": "2"}]},
    ],
)
def test_json_documents(tmp_path, document):
    file = tmp_path / "set.json"
    file.write_text(json.dumps(document, indent=1))
    problems = read_jsonl(file)
    assert [(p.problem, p.answer, p.id) for p in problems] == [
        ("p", "1", "set:1"),
        ("q", "2", "set:2"),
    ]


def test_a_file_called_json_may_hold_json_lines(tmp_path):
    file = tmp_path / "set.json"
    file.write_text('{"problem": "p", "answer": 1}\n{"problem": "q", "answer": 2}\n')
    assert [p.answer for p in read_jsonl(file)] == ["1", "2"]


def test_parquet_reads_like_json_lines(tmp_path):
    rows = [
        {"problem": "p", "answer": 27.0, "reward_model": {"ground_truth": "27"}},
        {"problem": "q\u2028r", "answer": 3.5, "reward_model": {"ground_truth": "7/2"}},
    ]
    file = tmp_path / "set.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    assert [(p.problem, p.answer) for p in read_jsonl(file)] == [
        ("p", "27.0"),
        ("q\u2028r", "3.5"),
    ]
    nested = read_jsonl(file, answer_field="reward_model.ground_truth")
    assert [p.answer for p in nested] == ["27", "7/2"]


def test_parquet_nan_is_no_answer(tmp_path):
    file = tmp_path / "set.parquet"
    table = pyarrow.table({"problem": ["p", "q"], "answer": [1.0, float("nan")]})
    parquet.write_table(table, file)
    with pytest.raises(DataError, match=r"set\.parquet, row 2.*'answer'"):
        read_jsonl(file)


def test_d04_a_bad_entry_is_named(tmp_path):
    file = tmp_path / "set.json"
    file.write_text('[{"problem": "p", "answer": 1}, 7]')
    with pytest.raises(DataError, match="entry 2: expected a JSON object, found Number"):
        read_jsonl(file)
    assert len(read_jsonl(file, skip_bad_lines=True)) == 1


def test_what_is_no_such_file_says_so(tmp_path):
    with pytest.raises(DataError, match=r"gone\.jsonl: no such file"):
        read_rows(tmp_path / "gone.jsonl")
    (tmp_path / "set.parquet").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(DataError, match="not a parquet file"):
        read_rows(tmp_path / "set.parquet")
