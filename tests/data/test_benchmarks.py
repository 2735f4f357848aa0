"""The seven sets from files of the shapes that publishers ship. All problems here are made up."""

import doctest
import json

import pyarrow
import pytest
from pyarrow import parquet

from saki_jax.data import benchmarks
from saki_jax.data.benchmarks import BENCHMARKS, find_files, load, read_set
from saki_jax.data.prompts import DataError
from saki_jax.evals.grade import Verdict, grade


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def made_up(n, **more):
    return [{"problem": f"What is {i} + {i}?", "answer": str(2 * i), **more} for i in range(n)]


def test_docstrings():
    assert doctest.testmod(benchmarks).failed == 0


def test_sizes_and_order_are_the_papers():
    assert [(b.name, b.size) for b in BENCHMARKS.values()] == [
        ("math500", 500),
        ("hmmt_feb_2026", 33),
        ("aime_2026", 30),
        ("aime_2025", 30),
        ("amc_2023", 40),
        ("minerva", 272),
        ("olympiadbench", 675),
    ]


# One row as each publisher writes it, with what it must become: (id, answer).
SHAPES = {
    "math500": (
        {"problem": "p", "solution": r"\boxed{9}", "answer": "3", "unique_id": "test/a/1.json"},
        ("test/a/1.json", "3"),
    ),
    "hmmt_feb_2026": (
        {"problem_idx": 4, "problem": "p", "answer": "3^{2025}", "problem_type": ["Algebra"]},
        ("4", "3^{2025}"),
    ),
    "aime_2026": ({"problem_idx": 1, "answer": 70, "problem": "p"}, ("1", "70")),
    "aime_2025": ({"question": "p", "answer": r"336^\circ"}, ("aime_2025:1", r"336^\circ")),
    "amc_2023": ({"id": 0, "question": "p", "answer": 27.0, "url": "u"}, ("0", "27.0")),
    "minerva": (
        {"problem": "p", "type": "t", "idx": 7, "solution": r"so \boxed{1} \boxed{4.5e33} erg"},
        ("7", "4.5e33"),
    ),
    "olympiadbench": (
        {"id": 1606, "question": "p", "solution": ["s"], "final_answer": ["$(1,2), (3,4)$"]},
        ("1606", "$(1,2), (3,4)$"),
    ),
}


@pytest.mark.parametrize("name", BENCHMARKS)
@pytest.mark.parametrize("ending", ["jsonl", "json", "parquet"])
def test_published_shapes(tmp_path, name, ending):
    row, (named, answer) = SHAPES[name]
    file = tmp_path / f"{name}.{ending}"
    if ending == "parquet":
        parquet.write_table(pyarrow.Table.from_pylist([row]), file)
    else:
        file.write_text(json.dumps(row if ending == "jsonl" else [row]))
    (problem,) = load(name, [file], check_size=False)
    assert (problem.id, problem.problem, problem.answer) == (named, "p", answer)
    assert problem.source == name


def test_golds_as_published_can_be_graded():
    for gold, response in {
        "27.0": "27",
        r"336^\circ": "336",
        "$2n-2$": "2n-2",
        "4.5e33": "4.5e33",
    }.items():
        assert grade(gold=gold, response=rf"\boxed{{{response}}}") is Verdict.CORRECT, gold


@pytest.mark.parametrize(("name", "given"), [("amc_2023", 83), ("olympiadbench", 674)])
def test_a_wrong_size_names_both_numbers(tmp_path, name, given):
    file = write(tmp_path / "set.jsonl", made_up(given))
    with pytest.raises(DataError, match=rf"{BENCHMARKS[name].size} problems.*holds {given}: "):
        load(name, [file])
    assert len(load(name, [file], check_size=False)) == given


def test_d01_thirty_problems_times_32_rows_are_thirty_problems(tmp_path):
    rows = [{**row, "id": f"{i}"} for i, row in enumerate(made_up(30) * 32)]
    for given in (rows, made_up(30) * 32, sorted(rows, key=lambda r: r["problem"])):
        file = write(tmp_path / "set.jsonl", given)
        problems = load("aime_2026", [file])
        assert len(problems) == 30
        assert len({p.id for p in problems}) == 30


def test_two_parts_that_count_from_one(tmp_path):
    rows = [{**row, "id": i % 15} for i, row in enumerate(made_up(30))]
    parts = [write(tmp_path / "I.jsonl", rows[:15]), write(tmp_path / "II.jsonl", rows[15:])]
    problems = load("aime_2025", parts)
    assert [p.id for p in problems[:2]] == ["I/0", "I/1"]
    assert problems[15].id == "II/0"
    with pytest.raises(DataError, match=r"30 problems.* holds 15: .*both files"):
        load("aime_2025", parts[:1])


def test_d07_problems_with_the_same_beginning_stay_apart(tmp_path):
    rows = [{"id": "a", "problem": "Let x = 1. Find x.", "answer": "1"}]
    rows += [{"id": "b", "problem": "Let x = 1. Find x. Twice.", "answer": "2"}]
    problems = read_set("own", [write(tmp_path / "own.jsonl", rows * 2)])
    assert [(p.id, p.answer) for p in problems] == [("a", "1"), ("b", "2")]


def test_contradictory_golds_are_refused(tmp_path):
    rows = [{"problem": "p", "answer": "1"}, {"problem": "p ", "answer": "2"}]
    with pytest.raises(DataError, match=r"own:1 and own:2 are the same question .*'1' and '2'"):
        read_set("own", [write(tmp_path / "own.jsonl", rows)])


@pytest.mark.parametrize(
    "row",
    [
        {"problem": None, "answer": "1"},
        {"problem": "", "answer": "1"},
        {"answer": "1"},
        {"problem": ["p"], "answer": "1"},
        {"problem": "p", "answer": None},
        {"problem": "p", "answer": "  "},
        {"problem": "p", "answer": []},
        {"problem": "p"},
        {"problem": "p", "solution": "no box here"},
        {"problem": "p", "solution": r"\boxed{1"},
    ],
)
def test_d05_rows_without_question_or_answer_are_named(tmp_path, row):
    file = write(tmp_path / "own.jsonl", [{"problem": "q", "answer": 0}, row])
    with pytest.raises(DataError, match=r"own\.jsonl, line 2: "):
        read_set("own", [file])


def test_own_field_names(tmp_path):
    file = write(tmp_path / "own.jsonl", [{"q": "p", "a": 5, "answer": "no"}])
    (problem,) = read_set("own", [file], question_field="q", answer_field="a")
    assert (problem.problem, problem.answer) == ("p", "5")


def test_files_are_found_by_name(tmp_path):
    one = write(tmp_path / "math500.jsonl", made_up(1))
    two = [write(tmp_path / "aime_2025" / f"{part}.jsonl", made_up(1)) for part in ("I", "II")]
    assert find_files(tmp_path) == {"math500": [one], "aime_2025": two}
    write(tmp_path / "math500.json", made_up(1))
    with pytest.raises(DataError, match="math500 is there more than once"):
        find_files(tmp_path)
    with pytest.raises(DataError, match="no evaluation set in"):
        find_files(tmp_path / "nothing")


def test_an_unknown_set_is_refused():
    with pytest.raises(DataError, match="no evaluation set 'amc23'; known are math500, "):
        load("amc23", ["x"])
