"""JSON-lines files of problems: what is read, what is refused, and how it is told."""

import json
import logging

import pytest

from saki_jax.data.prompts import (
    DataError,
    Problem,
    deduplicate,
    distinct_for_evaluation,
    find_duplicates,
    read_jsonl,
)


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def test_fields_ids_and_source(tmp_path):
    path = write(
        tmp_path / "set.jsonl",
        {"id": "a/1", "problem": "1+1?", "answer": "2"},
        {"prompt": "2+2?", "answer": 4},
        {"question": "x?", "gold": "27.0"},
    )
    assert read_jsonl(path) == [
        Problem("a/1", "1+1?", "2", "set"),
        Problem("set:2", "2+2?", "4", "set"),
        Problem("set:3", "x?", "27.0", "set"),
    ]


def test_nested_fields_are_named_with_dots(tmp_path):
    row = {"prompt": [{"content": "q", "role": "user"}], "reward_model": {"ground_truth": "7"}}
    path = write(tmp_path / "dapo.jsonl", row)
    (read,) = read_jsonl(
        path, problem_field="prompt.0.content", answer_field="reward_model.ground_truth"
    )
    assert (read.problem, read.answer) == ("q", "7")
    with pytest.raises(DataError, match=r"line 1: no field 'prompt.1.content': nothing at '1'"):
        read_jsonl(path, problem_field="prompt.1.content")


def test_numbers_keep_their_digits(tmp_path):
    digits = "9" * 5000
    (tmp_path / "n.jsonl").write_text(
        '{"problem": "a", "answer": 27.0}\n{"problem": "b", "answer": 4.50e33}\n'
        f'{{"problem": "c", "answer": {digits}}}\n'
    )
    assert [p.answer for p in read_jsonl(tmp_path / "n.jsonl")] == ["27.0", "4.50e33", digits]


def test_d01_repeats_are_removed_when_asked(caplog):
    rows = [Problem(f"i{n}", f"question {n % 3}", str(n % 3), "s") for n in range(300)]
    with caplog.at_level(logging.INFO):
        kept = deduplicate(rows, remove=True)
    assert [p.id for p in kept] == ["i0", "i1", "i2"]
    assert "297 removed" in caplog.text


def test_d01_repeats_are_kept_by_default_and_counted(caplog):
    rows = [Problem(f"i{n}", f"question {n % 3}", str(n % 3), "s") for n in range(300)]
    with caplog.at_level(logging.INFO):
        assert deduplicate(rows, remove=False) == rows
    assert "297 repeat" in caplog.text


def test_d01_contradictory_questions_are_removed_altogether():
    rows = [
        Problem("1", "q", "5", "s"),
        Problem("2", "q ", "6", "s"),
        Problem("3", "other", "1", "s"),
    ]
    assert find_duplicates(rows).conflicts == ("q",)
    assert [p.id for p in deduplicate(rows, remove=True)] == ["3"]


def test_d01_evaluation_files_hold_each_problem_once():
    same_ids = [Problem(f"aime/{n % 30}", f"q{n % 30}", "1", "s") for n in range(30 * 32)]
    own_ids = [Problem(f"line {n}", f"q{n % 30}", "1", "s") for n in range(30 * 32)]
    assert len(distinct_for_evaluation(same_ids)) == 30
    assert len(distinct_for_evaluation(own_ids)) == 30


def test_d07_one_id_for_two_problems_is_refused():
    rows = [Problem("1", "q", "5", "s"), Problem("1", "other", "5", "s")]
    with pytest.raises(DataError, match="the id '1' names two different problems"):
        distinct_for_evaluation(rows)


def test_d03_only_a_newline_ends_a_line(tmp_path):
    text = "a\u2028b\u2029c\u0085d\x0be"
    line = json.dumps({"problem": text, "answer": "1"}, ensure_ascii=False)
    line = line.replace("\\u000b", "\x0b")
    raw = "\ufeff" + line + "\r\n\r\n" + '{"problem": "last", "answer": "2"}'
    path = tmp_path / "odd.jsonl"
    path.write_bytes(raw.encode("utf-8"))
    first, last = read_jsonl(path)
    assert first.problem == text
    assert (last.problem, last.id) == ("last", "odd:3")


def test_d04_a_bad_line_is_named(tmp_path, caplog):
    path = tmp_path / "bad.jsonl"
    good = '{"prompt": "x", "answer": "1"}\n'
    path.write_text(good * 2 + '{"prompt": "x"\n' + good * 2)
    with pytest.raises(DataError, match=r"bad\.jsonl, line 3: not one JSON object"):
        read_jsonl(path)
    with caplog.at_level(logging.WARNING):
        assert len(read_jsonl(path, skip_bad_lines=True)) == 4
    assert "1 bad lines left out" in caplog.text


@pytest.mark.parametrize("line", ['{"problem": "a"} {"problem": "b"}', "[1]", '{"a": NaN}', "3"])
def test_d04_a_line_is_one_object(tmp_path, line):
    (tmp_path / "f.jsonl").write_text("\n" + line + "\n")
    with pytest.raises(DataError, match="line 2"):
        read_jsonl(tmp_path / "f.jsonl")


def test_d04_a_missing_or_empty_or_undecodable_file_is_named(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        read_jsonl(tmp_path / "absent.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match="no problem in this file"):
        read_jsonl(tmp_path / "empty.jsonl")
    (tmp_path / "latin.jsonl").write_bytes(b'{"a": 1}\n{"b": "\xe9"}\n')
    with pytest.raises(DataError, match="line 2: not UTF-8"):
        read_jsonl(tmp_path / "latin.jsonl")


GOOD = {"problem": "q", "answer": "1"}


@pytest.mark.parametrize(
    "change",
    [
        {"problem": None},
        {"problem": ""},
        {"problem": " \n"},
        {"problem": ["q"]},
        {"problem": 3},
        {"problem": True},
        {"answer": None},
        {"answer": ""},
        {"answer": "   "},
        {"answer": ["1"]},
        {"answer": False},
    ],
)
def test_d05_rows_without_text_or_answer_are_refused(tmp_path, change):
    path = write(tmp_path / "rows.jsonl", GOOD, {**GOOD, **change})
    with pytest.raises(DataError, match=r"rows\.jsonl, line 2: the (field|question)"):
        read_jsonl(path)


@pytest.mark.parametrize("missing", ["problem", "answer"])
def test_d05_missing_fields_are_refused(tmp_path, missing):
    row = {k: v for k, v in GOOD.items() if k != missing}
    with pytest.raises(DataError, match=r"line 1: no field '.*found: \['"):
        read_jsonl(write(tmp_path / "rows.jsonl", row))


def test_d05_zero_is_an_answer(tmp_path):
    path = write(tmp_path / "z.jsonl", {**GOOD, "answer": 0}, {**GOOD, "answer": "0"})
    assert [p.answer for p in read_jsonl(path)] == ["0", "0"]
    assert all(type(p.answer) is str for p in read_jsonl(path))
