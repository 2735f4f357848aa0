"""``python -m saki_jax.data check``: what it counts, and that it only reports."""

import json
import subprocess
import sys

import pytest

from saki_jax.data import addition, check
from saki_jax.data.prompts import DataError
from saki_jax.data.template import PromptFormat
from saki_jax.models import tokenizer as tokenizers

DAPO_SUFFIX = r" Please reason step by step, and put your final answer within \boxed{{}}."


def write(path, rows):
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return path


@pytest.fixture
def training_file(tmp_path):
    return write(
        tmp_path / "train.jsonl",
        [
            {"prompt": "Find a." + DAPO_SUFFIX, "answer": "1"},
            {"prompt": "Find b." + DAPO_SUFFIX, "answer": -2},
            {"prompt": "Find a." + DAPO_SUFFIX, "answer": "1"},
            {"prompt": "Find b." + DAPO_SUFFIX, "answer": "3"},
            {"prompt": "Find c.", "answer": "0.5"},
            '{"prompt": "x"',
            {"prompt": "Find d.", "answer": " "},
        ],
    )


def test_counts(training_file):
    report = check.check_file(training_file)
    assert (report["rows"], report["bad_rows"]) == (7, 2)
    assert (report["distinct_questions"], report["repeats"], report["conflicts"]) == (3, 2, 1)
    assert report["conflicts_shown"][0]["answers"] == ["-2", "3"]
    assert report["answers"] == {"integers": 4, "decimals": 1, "negative_integers": 1}
    assert report["instruction_suffixes"] == 4
    assert [b.split(":")[0] for b in report["bad_rows_shown"]] == ["line 6", "line 7"]


def test_overlap_is_blind_to_instruction_and_spaces(training_file, tmp_path):
    own = write(
        tmp_path / "own.jsonl",
        [
            {"id": "x", "question": "Find  a.", "answer": "1"},
            {"id": "y", "question": "Find z.", "answer": "1"},
        ],
    )
    report = check.check_file(training_file, against=check.evaluation_sets([f"own={own}"]))
    assert report["overlap"] == {"own": {"problems": 2, "found_here": 1, "ids_shown": ["x"]}}


def test_d02_lengths_count_the_whole_prompt(tmp_path):
    addition.save_tokenizer(tmp_path)
    rows = [{"problem": "12+34=", "answer": "46"}, {"problem": "1234+4321=", "answer": "5555"}]
    report = check.check_file(
        write(tmp_path / "sums.jsonl", rows),
        tokenizer=tokenizers.load(tmp_path),
        prompt_format=PromptFormat(template="raw", instruction=""),
        max_length=9,
    )
    assert report["tokens"]["max"] == 10
    assert report["tokens"]["mean"] == 8.0
    assert report["tokens"]["over_limit"] == 1


def test_a_file_without_a_good_row_is_an_error(tmp_path):
    with pytest.raises(DataError, match=r"no good row \(1 bad"):
        check.check_file(write(tmp_path / "bad.jsonl", ["{"]))


def test_command(training_file, tmp_path, capsys):
    out = tmp_path / "report.json"
    assert check.main([str(training_file), "--json", str(out)]) == 1  # it has bad rows
    told = capsys.readouterr().out
    assert "rows                7, of them 2 bad" in told
    assert "'Find b. Please reason" in told
    assert json.loads(out.read_text())[0]["repeats"] == 2
    assert check.main([str(tmp_path / "gone.jsonl")]) == 1
    assert "no such file" in capsys.readouterr().err


def test_the_door_names_its_command(training_file):
    def run(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "saki_jax.data", *arguments], capture_output=True, text=True
        )

    assert "usage: python -m saki_jax.data check" in run("chek", "x").stderr
    found = run("check", str(training_file))
    assert found.returncode == 1
    assert "contradictory golds 1 questions" in found.stdout
