import json

import pytest

from saki_jax.train.config import ConfigError
from saki_jax.train.rundir import RunDir, as_json, write_json

FLAT = {"steps": 5, "seed": 1, "rollout.block_size": 8}


def claimed(path, flat=FLAT):
    folder = RunDir(path)
    continued = folder.claim(flat)
    folder.begin(flat)
    folder.close()
    return continued


def test_a_folder_belongs_to_one_configuration(tmp_path):
    assert not claimed(tmp_path / "run")
    assert claimed(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"(?s)rollout.block_size: 8 there, 4 now.*seed: 1 there"):
        claimed(tmp_path / "run", FLAT | {"seed": 2, "rollout.block_size": 4})
    assert json.loads((tmp_path / "run" / "config.json").read_text()) == FLAT


def test_keys_that_came_or_went_are_named(tmp_path):
    claimed(tmp_path)
    with pytest.raises(ConfigError, match=r"new: \(no such key\) there, 1 now"):
        claimed(tmp_path, FLAT | {"new": 1})


def test_a_run_that_never_began_leaves_the_folder_free(tmp_path):
    folder = RunDir(tmp_path)
    folder.claim(FLAT)
    folder.close()
    assert not claimed(tmp_path, FLAT | {"seed": 3})


def test_results_without_a_configuration_are_not_touched(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match=r"holds metrics.jsonl but no config.json"):
        claimed(tmp_path)


def test_two_processes_cannot_share_a_folder(tmp_path):
    first = RunDir(tmp_path)
    first.claim(FLAT)
    with pytest.raises(ConfigError, match="another process"):
        RunDir(tmp_path).claim(FLAT)
    first.close()
    assert not claimed(tmp_path)


def test_steps_behind_the_checkpoint_are_set_aside_not_lost(tmp_path):
    folder = RunDir(tmp_path)
    lines = [json.dumps({"step": step}) + "\n" for step in (1, 2, 3, 4)]
    torn = '{"step": 5, "lo'
    folder.metrics.write_text("".join(lines) + torn)
    folder.evaluations.mkdir()
    for name in ("teacher.json", "student_000000.json", "student_000004.json"):
        (folder.evaluations / name).write_text("{}")
    assert folder.set_aside_after(2) == 3
    assert [record["step"] for record in folder.read_metrics()] == [1, 2]
    kept = tmp_path / "metrics.jsonl.superseded-1"
    assert kept.read_text() == "".join(lines) + torn
    assert sorted(p.name for p in folder.evaluations.iterdir()) == [
        "student_000000.json",
        "student_000004.json.superseded-1",
        "teacher.json",
    ]
    assert folder.set_aside_after(2) == 0
    assert folder.set_aside_after(1) == 1
    assert (tmp_path / "metrics.jsonl.superseded-2").exists()


def test_json_has_null_for_what_is_no_number(tmp_path):
    write_json(tmp_path / "a.json", {"x": float("nan"), "y": [float("inf"), 1.5]})
    assert json.loads((tmp_path / "a.json").read_text()) == {"x": None, "y": [None, 1.5]}
    with pytest.raises(FileExistsError):
        write_json(tmp_path / "a.json", {})
    assert as_json((1, float("-inf"))) == [1, None]
