"""The command line, called in this process."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from saki_jax.train import __main__ as command
from saki_jax.train import loop
from saki_jax.train.config import flatten

ROOT = Path(__file__).parents[2]
QUICKSTART = str(ROOT / "configs" / "quickstart.py")
PAPER = str(ROOT / "configs" / "paper.py")


@pytest.fixture(autouse=True)
def keep_logging(monkeypatch):
    monkeypatch.setattr(logging, "basicConfig", lambda **kwargs: None)


def refused(*arguments):
    """What the process says at its end."""
    with pytest.raises(SystemExit) as stopped:
        command.main(arguments)
    assert isinstance(stopped.value.code, str)  # told on stderr, status 1
    return stopped.value.code


@pytest.mark.parametrize(
    "override",
    ["--config.rollout.blok_size=4", "--config.block_size=4", "-config.rollout.blocksize=4"],
)
def test_a_misspelt_key_is_refused_with_the_nearest_right_one(override):
    assert "the nearest is rollout.block_size" in refused("--config", QUICKSTART, override)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--config is missing"),
        (["--config=configs/nowhere.py"], "no such file"),
        (["--config", QUICKSTART, "--config.steps=many"], "many"),
        (["--config", QUICKSTART, "--config.rollout=4"], "rollout.block_size"),
        (["--config", QUICKSTART, "--workdri=x"], "workdir"),
        (["--config", QUICKSTART, "steps=5"], "--config.key=value"),
        (["--config", QUICKSTART, "--config.method=skai"], "nearest: saki"),
        (["--config", QUICKSTART, "--config.rollout.temperature=0.7"], "must be 1.0"),
        (["--config", f"{PAPER}:saki,7b"], "METHOD,STUDENT"),
        (["--config", f"{PAPER}:saki,1.7b"], "--config.student=FOLDER"),
    ],
)
def test_what_is_wrong_is_told_in_words(arguments, words):
    assert words in refused(*arguments)


def test_overrides_reach_the_configuration():
    config, workdir = command.read_arguments(
        [
            *("--config", f"{QUICKSTART}:trb", "--config.steps=5", "--config.seed", "1"),
            *("--config.rollout.block_size=2", "--config.epsilon.kind=cosine"),
            *("--config.rollout.end_ids=3,4", "--noconfig.eval.teacher", "--workdir", "somewhere"),
        ]
    )
    assert (config.method, config.steps, config.seed) == ("trb", 5, 1)
    assert (config.rollout.block_size, config.epsilon.kind) == (2, "cosine")
    assert (config.rollout.end_ids, config.eval.teacher) == ((3, 4), False)
    assert workdir == Path("somewhere")
    assert command.read_arguments(["--config", QUICKSTART])[1] == Path("runs/quickstart")


def test_the_paper_configuration():
    config, _ = command.read_arguments(["--config", f"{PAPER}:opd,0.6b"])
    flat = flatten(config)
    assert flat["method"] == "opd"
    assert flat["rollout.end_ids"] == [151643, 151645]
    assert flat["optimizer.learning_rate"] == 1e-6
    assert (flat["steps"], flat["epsilon.zero_at"]) == (200, 51)


def test_nothing_is_written_for_a_command_that_cannot_run(tmp_path):
    workdir = tmp_path / "run"
    said = refused(
        *("--config", QUICKSTART, f"--config.student={tmp_path}", "--workdir", str(workdir))
    )
    assert str(tmp_path) in said
    assert not (workdir / "config.json").exists()


def test_the_module_runs_the_loop(monkeypatch, tmp_path):
    called = {}

    def run(config, workdir):
        called.update(steps=config.steps, workdir=workdir)

    monkeypatch.setattr(loop, "run", run)
    command.main(["--config", QUICKSTART, "--config.steps=3", "--workdir", str(tmp_path)])
    assert called == {"steps": 3, "workdir": tmp_path}


def test_help_says_how(capsys):
    command.main(["--help"])
    assert "--workdir DIR" in capsys.readouterr().out


def test_an_interrupted_run_says_how_to_go_on(monkeypatch):
    def run(config, workdir):
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "run", run)
    assert "the same command continues" in refused("--config", QUICKSTART)


def test_a_refusal_has_no_traceback_and_a_status():
    done = subprocess.run(
        [sys.executable, "-m", "saki_jax.train", "--config", QUICKSTART, "--config.stepz=3"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert (
        done.stderr == "error: there is no key stepz in the configuration; the nearest is steps\n"
    )
    assert done.stdout == ""
