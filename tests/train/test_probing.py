"""The probe inside a run: measured where asked, without a trace in the training."""

import json

import jax
import numpy as np
import pytest

from saki_jax.evals import checkpoint, probe_compare, probe_file, probe_measure
from saki_jax.evals import probe as door
from saki_jax.train import loop
from saki_jax.train.config import ConfigError
from saki_jax.train.probing import check_origin
from saki_jax.train.rundir import RunDir
from train_runs import small_config


@pytest.fixture(scope="module")
def probe_path(checkpoints, tmp_path_factory):
    student, teacher = map(str, checkpoints)
    path = tmp_path_factory.mktemp("probe") / "probe.npz"
    told = ["build", "--student", student, "--teacher", teacher, "--out", str(path)]
    told += ["--addition", "16", "--template", "raw", "--instruction", "", "--positions", "6"]
    assert door.main([*told, "--response-length", "12", "--epsilon", "0.3"]) == 0
    return path


def metrics(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    dropped = ("seconds", "per_second", "probe_")
    kept = [{k: v for k, v in line.items() if not any(d in k for d in dropped)} for line in lines]
    return lines, kept


def test_a_probe_changes_no_step_and_says_what_the_command_says(checkpoints, probe_path, tmp_path):
    changes = {"steps": 3, "checkpoint__keep": 1, "checkpoint__keep_steps": (1,)}
    loop.run(small_config(checkpoints, **changes), tmp_path / "without")
    changes |= {"probe__path": str(probe_path), "probe__steps": (1, 3)}
    folder = tmp_path / "with"
    loop.run(small_config(checkpoints, **changes), folder)
    lines, same = metrics(folder)
    assert same == metrics(tmp_path / "without")[1]
    assert [f"probe_{g}_c1" in lines[0] for g in probe_compare.GROUPS] == [True] * 3
    assert ["probe_all_kl" in line for line in lines] == [True, False, True]

    probe = probe_file.load(probe_path)
    for step in (1, 3):  # 1 is no multiple of checkpoint.every, and older than keep: it is marked
        kept = checkpoint.load(checkpoint.find(folder, step=step), dtype=np.float32)
        teacher = checkpoint.load(checkpoint.find(checkpoints[1]), dtype=np.float32)
        measure = probe_measure.make_measure(kept.model, teacher.model)
        expected = measure(probe, kept.params, teacher.params)
        file = folder / "probe" / f"step_{step:06d}.npz"
        found, meta = probe_measure.load_figures(file, probe)
        assert meta["step"] == step
        for name, values in expected.items():
            np.testing.assert_allclose(found[name], values, rtol=1e-5, atol=1e-7)
        level = probe_compare.levels(probe, found, group="corrected")["c1"]
        told = json.loads(file.with_suffix(".json").read_text())["groups"]["corrected"]["c1"]
        assert told == level.to_json()
        assert lines[step - 1]["probe_corrected_c1"] == pytest.approx(level.value)
    first, last = (folder / "probe" / f"step_00000{step}.json" for step in (1, 3))
    assert json.loads(first.read_text())["groups"] != json.loads(last.read_text())["groups"]


def test_a_run_that_goes_back_measures_again(tmp_path):
    folder = RunDir(tmp_path)
    folder.probe.mkdir()
    names = [f"step_00000{step}.{kind}" for step in (2, 4) for kind in ("json", "npz")]
    for name in names:
        (folder.probe / name).touch()
    folder.set_aside_after(3)
    assert sorted(path.name for path in folder.probe.iterdir()) == [
        *names[:2],
        *(f"{name}.superseded-1" for name in names[2:]),
    ]


def test_a_probe_of_other_models_is_refused(checkpoints, probe_path):
    probe = probe_file.load(probe_path)
    check_origin(probe, small_config(checkpoints))
    with pytest.raises(ConfigError, match="built with mask_unused_rows=False, the run has True"):
        check_origin(probe, small_config(checkpoints, mask_unused_rows=True))
    for role in ("student", "teacher"):
        other = small_config(checkpoints, **{role: str(checkpoints[role == "student"])})
        with pytest.raises(ConfigError, match=f"was built with the {role} "):
            check_origin(probe, other)


@pytest.mark.parametrize(
    ("path", "steps", "told"),
    [
        ("gone.npz", (1,), "is no file; build a probe first"),
        (__file__, (), "at least one step"),
        (__file__, (1, 7), "from 1 to steps=6"),
    ],
)
def test_wishes_that_cannot_be_are_told(checkpoints, path, steps, told):
    with pytest.raises(ConfigError, match=told):
        small_config(checkpoints, probe__path=path, probe__steps=steps)


@pytest.mark.slow
def test_the_mesh_shares_the_sequences(checkpoints, probe_path, tmp_path):
    changes = {"probe__path": str(probe_path), "probe__steps": (1,), "steps": 1, "method": "opd"}
    for name, mesh in (("one", {"mesh__data": 1}), ("eight", {"mesh__data": 4, "mesh__fsdp": 2})):
        loop.run(small_config(checkpoints, **changes, **mesh), tmp_path / name)
    one, eight = (metrics(tmp_path / name)[0][0] for name in ("one", "eight"))
    assert len(jax.devices()) == 8
    for name in (key for key in one if key.startswith("probe_")):
        assert eight[name] == pytest.approx(one[name], rel=1e-3, abs=1e-3)
