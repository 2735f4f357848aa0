"""Tables from summaries of evaluations, checked by hand; all figures are made up."""

import csv
import io
import json

import numpy as np
import pytest

from saki_jax.evals import entries, results, tables
from saki_jax.evals.bootstrap import Estimate
from saki_jax.evals.folder import FolderError, write_json
from saki_jax.evals.table import Table

SAMPLES = 8
PROTOCOL = {
    "step": 200,
    "weights": "w",
    "student": "1.7B",
    "samples": SAMPLES,
    "max_new_tokens": 16384,
    "end_ids": [1, 2],
    "template": "chat",
    "instruction": "i",
    "enable_thinking": False,
}


def made_up(method, right, *, finished=True, whole=True, **protocol):
    """A summary; `right` is {set: right samples of each problem}."""
    sets = {}
    for name, counts in right.items():
        result = {
            "title": name.upper(),
            "whole": whole,
            "problems": len(counts),
            "samples": SAMPLES,
            "verdicts": {"correct": sum(counts), "no_answer": 3},
            "truncated": 0.25,
            "mean_length": 100.0,
            "right": {f"p{i}": c for i, c in enumerate(counts)},
        }
        for figure in ("mean", "pass"):
            result[figure] = Estimate(0.5, 0.4, 0.6, len(counts)).to_json()
        sets[name] = result
    return {
        "finished": finished,
        "protocol": PROTOCOL | {"method": method} | protocol,
        "sets": sets,
        "average": results.average(sets, resamples=100),
    }


def folder(tmp_path, name, summary):
    path = tmp_path / name
    path.mkdir()
    write_json(path / "summary.json", summary)
    return str(path)


RIGHT = {
    "opd": {"a": [8, 0, 4, 0], "b": [0, 0]},
    "trb": {"a": [8, 0, 4, 0], "b": [2, 0]},
    "random_tm": {"a": [8, 2, 4, 0], "b": [2, 0]},
    "saki": {"a": [8, 4, 4, 1], "b": [4, 0]},
}


@pytest.fixture
def folders(tmp_path):
    return [folder(tmp_path, m, made_up(m, RIGHT[m])) for m in ("saki", "opd", "random_tm", "trb")]


def by_name(built):
    return {table.name: table for table in built}


def row_of(table, method):
    row = next(r for r in table.rows if r[0] == method)
    return dict(zip(table.columns, row, strict=True))


def test_the_main_table_by_hand(folders):
    built = by_name(tables.build(entries.read_entries(folders)))
    table = built["table_1"]
    assert [row[0] for row in table.rows] == ["OPD", "TRB", "SAKI"]  # the paper's order
    saki = row_of(table, "SAKI")
    assert saki["A"].value == pytest.approx(100 * (8 + 4 + 4 + 1) / 32)
    assert saki["B"].value == pytest.approx(100 * 4 / 16)
    # Sets weigh equally, whatever their size.
    assert saki["Average"].value == pytest.approx((saki["A"].value + saki["B"].value) / 2)
    passed = row_of(built["table_6"], "SAKI")
    assert passed["A"].value == 100.0
    assert passed["B"].value == 50.0


def test_the_split_into_budget_and_placement_adds_up(folders):
    split = by_name(tables.build(entries.read_entries(folders)))["figure_3c"]
    budget, placement, both = (row[2] for row in split.rows)
    assert budget.value == pytest.approx(100 * (2 / 32) / 2)
    assert placement.value == pytest.approx(100 * (3 / 32 + 2 / 16) / 2)
    assert both.value == pytest.approx(budget.value + placement.value)
    assert budget.low <= budget.value <= budget.high


def test_controls_are_compared_with_saki_by_problem(folders):
    controls = by_name(tables.build(entries.read_entries(folders)))["table_2"]
    assert [row[0] for row in controls.rows] == ["TRB", "Random-TM", "SAKI"]
    assert row_of(controls, "SAKI")["SAKI minus it, Mean@8"] is None
    gap = row_of(controls, "Random-TM")["SAKI minus it, Mean@8"]
    assert gap.value == pytest.approx(100 * (3 / 32 + 2 / 16) / 2)


def test_differences_to_a_reference_set_by_set(folders):
    table = tables.differences(entries.read_entries(folders), "opd")
    assert [row[:3] for row in table.rows[-2:]] == [
        ("SAKI", "1.7B", "Mean@8"),
        ("SAKI", "1.7B", "Pass@8"),
    ]
    mean = dict(zip(table.columns, table.rows[-2], strict=True))
    assert mean["A"].value == pytest.approx(100 * 5 / 32)
    assert mean["B"].value == pytest.approx(100 * 4 / 16)
    assert mean["Average"].value == pytest.approx((mean["A"].value + mean["B"].value) / 2)
    with pytest.raises(entries.TablesError, match="the reference 'skd' is none of opd, trb"):
        tables.differences(entries.read_entries(folders), "skd")


def test_without_controls_there_is_no_control_table(folders):
    built = tables.build(entries.read_entries(folders[:2]))
    assert [table.name for table in built] == ["table_1", "table_6"]


def test_seeds_are_averaged_and_their_spread_is_said(tmp_path):
    runs = [{"a": [8, 0]}, {"a": [4, 0]}, {"a": [0, 0]}]
    given = [folder(tmp_path, f"s{i}", made_up("saki", r)) for i, r in enumerate(runs)]
    (entry,) = entries.read_entries(given)
    row = row_of(by_name(tables.build([entry]))["table_1"], "SAKI")
    assert row["Average"].value == 25.0
    assert row["runs"] == 3
    assert row["sd"] == pytest.approx(np.std([50.0, 25.0, 0.0], ddof=1))


def test_students_of_several_sizes_stand_below_each_other(tmp_path, folders):
    small = folder(tmp_path, "small", made_up("saki", RIGHT["saki"], student="0.6B"))
    built = by_name(tables.build(entries.read_entries([*folders, small])))
    assert [row[:2] for row in built["table_1"].rows][-2:] == [("SAKI", "1.7B"), ("SAKI", "0.6B")]
    # Only the size with all three methods can be split.
    assert {row[0] for row in built["figure_3c"].rows} == {"1.7B"}


def test_rows_may_be_named_on_the_command_line(folders):
    (entry,) = entries.read_entries([f"base@4B={folders[0]}"])
    assert (entry.title, entry.student) == ("base", "4B")


def test_a_missing_set_leaves_its_cell_and_the_average_empty(tmp_path, folders):
    part = folder(tmp_path, "part", made_up("exopd", {"a": [1, 1, 1, 1]}))
    row = row_of(by_name(tables.build(entries.read_entries([*folders, part])))["table_1"], "ExOPD")
    assert row["B"] is None
    assert row["Average"] is None
    assert row["A"].value == 12.5


def test_folders_evaluated_otherwise_are_refused(tmp_path, folders):
    other = folder(tmp_path, "other", made_up("skd", RIGHT["opd"], max_new_tokens=64))
    with pytest.raises(entries.TablesError, match="max_new_tokens: 16384 and 64"):
        entries.read_entries([*folders, other])
    with pytest.raises(FolderError, match=r"summary\.json is missing"):
        entries.read_entries([str(tmp_path / "gone")])
    more = folder(tmp_path, "more", made_up("saki", {"a": [1] * 5, "b": [0, 0]}))
    with pytest.raises(entries.TablesError, match=r"runs of SAKI 1\.7B differ in problems of a"):
        tables.build(entries.read_entries([folders[0], more]))


def test_what_is_not_whole_is_said(tmp_path):
    given = folder(tmp_path, "x", made_up("saki", RIGHT["saki"], finished=False, whole=False))
    note = tables.build(entries.read_entries([given]))[0].note
    assert "Only part of some sets" in note
    assert "not finished" in note
    assert "average is without" not in note  # none of the seven is there: other sets were meant
    given = folder(tmp_path, "y", made_up("saki", {"minerva": [1, 0]}))
    note = tables.build(entries.read_entries([given]))[0].note
    assert "without MATH-500" in note


def test_files_of_the_command(tmp_path, folders, capsys):
    out = tmp_path / "out"
    assert tables.main([*folders, "--out", str(out)]) == 0
    told = capsys.readouterr().out
    assert "### Table 1: Mean@8" in told
    assert (out / "tables.md").read_text().strip() == told.strip()
    found = json.loads((out / "tables.json").read_text())
    saki = found["table_1"]["rows"][-1]
    rows = list(csv.DictReader(io.StringIO((out / "table_1.csv").read_text())))
    assert float(rows[-1]["A"]) == saki["A"]["value"]
    assert float(rows[-1]["A high"]) == saki["A"]["high"]
    assert tables.main([str(tmp_path / "gone")]) == 1
    assert "is missing" in capsys.readouterr().err


def test_cells_in_markdown_and_csv():
    table = Table(
        "t",
        "T",
        ("name", "x", "n"),
        (("a|b", Estimate(12.345, 10.0, 15.0, 9), 3), ("c", None, None)),
    )
    assert table.to_markdown().splitlines()[2:] == [
        "| name | x | n |",
        "|:--|--:|--:|",
        "| a\\|b | 12.3 [10.0, 15.0] | 3 |",
        "| c | – | – |",
    ]
    assert table.to_csv().splitlines() == [
        "name,x,x low,x high,n",
        "a|b,12.345,10.0,15.0,3",
        "c,,,,",
    ]
    with pytest.raises(ValueError, match="1 cells under 3 columns"):
        Table("t", "T", ("a", "b", "c"), (("x",),))
