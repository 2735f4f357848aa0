"""Whole runs in a folder: continuing, finishing, stopping."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from saki_jax.train import loop
from saki_jax.train.checkpoint import Checkpoints
from saki_jax.train.config import ConfigError
from train_runs import small_config

PROMISED = {
    *("step", "epsilon", "loss", "loss_surrogate", "loss_teacher_mode", "grad_norm"),
    *("ratio_clip_rate", "dual_clip_rate", "k1_clamp_rate", "log_ratio_clamp_rate"),
    *("correction_rate", "tv_mean", "pinsker_bound", "kl_over_epsilon", "beta_mean"),
    *("committed_per_wave", "teacher_forwards", "response_length", "truncation_rate"),
    *("entropy", "log_p_gap_mean", "log_p_gap_max", "teacher_mode_rate", "num_valid"),
    *("seconds_rollout", "seconds_update", "seconds_step", "tokens_per_second"),
    *("skipped_steps", "empty_batches", "nonfinite_rows"),
}


def metrics(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in line.items() if "seconds" not in k and "per_second" not in k}
        for line in lines
    ]


def last_state(folder):
    checkpoints = Checkpoints(folder / "checkpoints", keep=3)
    step = checkpoints.steps()[-1]
    state = checkpoints._manager.restore(step)["state"]
    checkpoints.close()
    return step, state


@pytest.fixture(scope="module")
def finished(checkpoints, tmp_path_factory):
    """A run of 6 steps, epsilon 0 from step 4 on, evaluated before, after 3 and at the end."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    config = small_config(checkpoints, eval__source="addition", eval__every=3)
    loop.run(config, folder)
    return config, folder


def test_every_step_has_its_line_with_all_that_is_promised(finished):
    _, folder = finished
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    for line in lines:
        assert line.keys() >= PROMISED
        assert line["num_valid"] == line["response_tokens"]
        assert line["tv_mean"] <= line["pinsker_bound"] + 1e-6
    assert [round(line["epsilon"], 6) for line in lines] == [0.02, 0.013333, 0.006667, 0, 0, 0]


def test_s23_at_epsilon_0_the_teacher_takes_no_part(finished):
    _, folder = finished
    guided, alone = metrics(folder)[:3], metrics(folder)[3:]
    assert all(line["teacher_forwards"] > 0 for line in guided)
    assert sum(line["corrections"] for line in guided) > 0
    assert sum(line["loss_teacher_mode"] for line in guided) > 0
    for line in alone:
        assert line["epsilon"] == 0.0
        assert line["teacher_forwards"] == 0
        assert line["corrections"] == 0
        assert line["loss_teacher_mode"] == 0.0
        assert line["kl_over_epsilon"] is None
        assert line["loss"] != 0.0


def test_r02_the_trainer_agrees_with_the_rollout(finished):
    for line in metrics(finished[1]):
        assert line["log_p_gap_max"] <= 1e-4
        assert line["ratio_clip_rate"] == 0.0


def test_the_summary_holds_the_scores_and_the_rates(finished):
    _, folder = finished
    summary = json.loads((folder / "summary.json").read_text())
    for name in ("teacher", "student_before", "student_after"):
        assert 0 <= summary[name]["mean_at_2"] <= summary[name]["pass_at_2"] <= 1
    assert summary["correction_rate"]["epsilon_above_0"] > 0
    assert summary["correction_rate"]["epsilon_0"] == 0.0
    names = {path.name for path in (folder / "evaluations").glob("*.json")}
    assert names == {
        "teacher.json",
        "student_000000.json",
        "student_000003.json",
        "student_000006.json",
    }
    assert list((folder / "tensorboard").iterdir())


def test_a_finished_run_is_said_to_be_and_left_alone(finished, capsys):
    config, folder = finished
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    summary = loop.run(config, folder)
    assert "is finished" in capsys.readouterr().out
    assert summary == json.loads((folder / "summary.json").read_text())
    del before[folder / ".lock"]
    assert before == {path: path.stat().st_mtime_ns for path in before}


def test_another_configuration_is_refused_by_the_keys_that_differ(finished, checkpoints):
    config, folder = finished
    other = config.copy_and_resolve_references()
    other.rollout.block_size = 2
    with pytest.raises(ConfigError, match=r"rollout.block_size: 4 there, 2 now"):
        loop.run(other, folder)


class Killed(Exception):
    pass


def killed_at(monkeypatch, step):
    """Makes a run die in the middle of a step."""
    update = loop._Run.step

    def dying(self, state, now):
        if now == step:
            raise Killed
        return update(self, state, now)

    monkeypatch.setattr(loop._Run, "step", dying)


def test_c04_c05_a_continued_run_is_the_uninterrupted_one_to_the_bit(
    finished, tmp_path, monkeypatch, capsys
):
    config, whole = finished
    with monkeypatch.context() as patch:
        killed_at(patch, 6)  # two steps behind the checkpoint of step 3
        with pytest.raises(Killed):
            loop.run(config, tmp_path)
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2, 3, 4, 5]
    loop.run(config, tmp_path)
    assert "after step 3" in capsys.readouterr().out
    assert metrics(tmp_path) == metrics(whole)
    (step, state), (_, expected) = last_state(tmp_path), last_state(whole)
    assert step == 6
    jax.tree.map(np.testing.assert_array_equal, state, expected)
    superseded = tmp_path / "metrics.jsonl.superseded-1"
    assert len(superseded.read_text().splitlines()) == 5
    for name in ("student_000003.responses.jsonl", "student_000006.json"):
        first, second = (folder / "evaluations" / name for folder in (tmp_path, whole))
        assert first.read_text() == second.read_text()


def test_a_run_killed_before_its_first_checkpoint_says_that_it_starts_again(
    checkpoints, tmp_path, monkeypatch, capsys
):
    config = small_config(checkpoints, steps=1, method="opd")
    with monkeypatch.context() as patch:
        killed_at(patch, 1)
        with pytest.raises(Killed):
            loop.run(config, tmp_path)
    summary = loop.run(config, tmp_path)
    assert "no checkpoint yet" in capsys.readouterr().out
    assert summary["student_after"] is None
    line = metrics(tmp_path)[0]
    assert (line["epsilon"], line["teacher_forwards"], line["corrections"]) == (0.0, 0, 0)


def test_r19_too_many_bad_steps_in_a_row_end_the_run_with_evidence(
    checkpoints, tmp_path, monkeypatch
):
    config = small_config(checkpoints, method="opd", trainer__max_skips_in_row=2)
    build = loop.setup.build

    def with_a_broken_loss(config):
        session = build(config)

        def update(state, rollout, key, extras):
            return session.update(state, rollout.replace(log_p=rollout.log_p * np.nan), key)

        return dataclasses.replace(session, update=update)

    monkeypatch.setattr(loop.setup, "build", with_a_broken_loss)
    with pytest.raises(loop.NotFiniteError, match=r"step 2: .*step_000002.npz"):
        loop.run(config, tmp_path)
    evidence = np.load(tmp_path / "evidence" / "step_000002.npz")
    assert evidence["tokens"].shape == (8, 12)
    assert evidence["prompts.tokens"].shape[0] == 8
    figures = json.loads((tmp_path / "evidence" / "step_000002.json").read_text())
    assert figures["loss"] is None
    assert figures["skipped_steps"] == 2
