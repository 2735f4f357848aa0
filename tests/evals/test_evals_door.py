"""Evaluation from the command's configuration to its files: resuming, refusing, reproducing."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from eval_toys import evaluate, make_once, save_model, small_config
from saki_jax.data import addition
from saki_jax.data.prompts import DataError
from saki_jax.evals import session
from saki_jax.evals.checkpoint import SubjectError, find, load
from saki_jax.evals.config import ConfigError
from saki_jax.evals.evaluate import TeacherCalledError
from saki_jax.evals.folder import FolderError
from saki_jax.evals.responses import ResponsesError, batch_size
from saki_jax.train.checkpoint import Checkpoints
from saki_jax.train.optimizer import make_optimizer
from saki_jax.train.state import init_state

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("models") / "student")


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    """An evaluation that nothing disturbed: (folder, summary)."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, evaluate(small_config(model), folder)


def lines(folder, name="addition"):
    return (folder / "responses" / f"{name}.jsonl").read_text().splitlines()


def test_every_response_is_kept_with_its_verdict(model, whole):
    folder, summary = whole
    records = [json.loads(line) for line in lines(folder)]
    assert len(records) == 20
    assert len({(r["problem_id"], r["sample"]) for r in records}) == 20
    subject = load(find(model), dtype=np.float32)
    for record in records:
        assert record["text"] == subject.tokenizer.decode(record["tokens"])
        ended = record["tokens"][-1] in subject.end_ids
        assert record["finish_reason"] == ("stop" if ended else "length")
        assert len(record["tokens"]) == 12 or ended
        assert record["verdict"] in ("correct", "incorrect", "no_answer")
    assert {r["finish_reason"] for r in records} == {"stop", "length"}
    found = summary["sets"]["addition"]
    assert sum(found["right"].values()) == sum(r["verdict"] == "correct" for r in records)
    without_token = sum(t >= len(addition.TOKENS) for r in records for t in r["tokens"])
    assert found["unknown_ids"] == without_token > 0
    assert summary["finished"]
    assert json.loads((folder / "summary.json").read_text()) == summary
    assert "| addition | 5 |" in (folder / "summary.md").read_text()


class Killed(BaseException):
    """Stands for a process that ends in the middle of a batch."""


def killed_after(calls: int):
    """A `make_once` whose generation dies in the call after so many."""

    def make(*arguments):
        generate, left = make_once(*arguments), [calls]

        def dying(*args, **kwargs):
            if not left[0]:
                raise Killed
            left[0] -= 1
            return generate(*args, **kwargs)

        return dying

    return make


def counting(count: list):
    def make(*arguments):
        generate = make_once(*arguments)

        def counted(params, prompts, *args, **kwargs):
            count.append(np.asarray(prompts.sequence_id).tolist())
            return generate(params, prompts, *args, **kwargs)

        return counted

    return make


@pytest.mark.parametrize("torn", [None, "half a line", "lines of a batch"])
def test_killed_and_started_again_it_ends_with_the_same_result(model, whole, tmp_path, torn):
    config = small_config(model)
    with pytest.raises(Killed):
        evaluate(config, tmp_path, make=killed_after(2))
    file = tmp_path / "responses" / "addition.jsonl"
    assert len(lines(tmp_path)) == 10
    if torn == "half a line":
        file.write_bytes(file.read_bytes()[:-30])
    elif torn == "lines of a batch":
        kept = file.read_bytes().split(b"\n")[:7]
        file.write_bytes(b"\n".join(kept) + b"\n" + b'{"problem_id"')
    calls: list = []
    summary = evaluate(config, tmp_path, make=counting(calls))
    # Nothing that was complete is generated again.
    assert [ids[0] for ids in calls] == ([10, 15] if torn is None else [5, 10, 15])
    assert summary == whole[1]
    assert sorted(lines(tmp_path)) == sorted(lines(whole[0]))
    assert (tmp_path / "summary.json").read_text() == (whole[0] / "summary.json").read_text()
    # A finished one generates nothing at all.
    assert evaluate(config, tmp_path, make=killed_after(0)) == summary


@pytest.mark.slow
def test_a_process_that_is_killed_outright_and_its_successor(model, tmp_path):
    """SIGKILL in the middle, whatever it hits: the files are those of an undisturbed process."""
    settings = {"template": "raw", "instruction": "", "grader": "exact", "sets.addition": 24}
    settings |= {"max_new_tokens": 24, "batch_rows": 8, "resamples": 200, "checkpoint": model}

    def start(folder):
        command = [sys.executable, "-m", "saki_jax.evals", "--config", "configs/eval.py"]
        command += [f"--config.{key}={value}" for key, value in settings.items()]
        return subprocess.Popen(
            [*command, f"--workdir={folder}"], cwd=ROOT, stdout=subprocess.DEVNULL
        )

    assert start(tmp_path / "whole").wait() == 0
    killed = start(tmp_path / "killed")
    file = tmp_path / "killed" / "responses" / "addition.jsonl"
    while not (file.exists() and file.read_bytes().count(b"\n") >= 16):
        assert killed.poll() is None
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert not (tmp_path / "killed" / "summary.json").exists()
    assert file.read_bytes().count(b"\n") < 24 * 8
    assert start(tmp_path / "killed").wait() == 0
    for path in (tmp_path / "whole").rglob("*.json*"):
        other = tmp_path / "killed" / path.relative_to(tmp_path / "whole")
        assert other.read_bytes() == path.read_bytes(), path.name


def test_r21_only_seed_problem_and_sample_decide_the_tokens(model, whole, tmp_path):
    others = {"batch_rows": 20, "slots": 0, "waves_per_call": 3, "mesh.data": 2, "mesh.tensor": 2}
    evaluate(small_config(model, **others), tmp_path / "cost")
    assert sorted(lines(tmp_path / "cost")) == sorted(lines(whole[0]))
    # Another seed, and another set of the same problems, have noise of their own.
    evaluate(small_config(model, seed=1), tmp_path / "seed")
    assert sorted(lines(tmp_path / "seed")) != sorted(lines(whole[0]))
    assert session.set_number("math500") != session.set_number("addition")


def test_the_first_problems_are_the_same_responses(model, whole, tmp_path):
    summary = evaluate(small_config(model, **{"sets.limit": 3}), tmp_path)
    assert set(lines(tmp_path)) == set(lines(whole[0])[:12])
    assert not summary["sets"]["addition"]["whole"]
    assert "addition (part)" in (tmp_path / "summary.md").read_text()


def test_a_teacher_that_ran_is_an_error(model, tmp_path):
    def make(*arguments):
        generate = make_once(*arguments)

        def guided(*args, **kwargs):
            rollout = generate(*args, **kwargs)
            counters = rollout.counters.replace(teacher_forwards=jax.numpy.int32(3))
            return rollout.replace(counters=counters)

        return guided

    with pytest.raises(TeacherCalledError, match="3 teacher forwards"):
        evaluate(small_config(model), tmp_path, make=make)


def test_another_protocol_or_model_is_refused(model, whole, tmp_path):
    folder = whole[0]
    with pytest.raises(FolderError, match="seed: 0 there, 1 now"):
        evaluate(small_config(model, seed=1), folder)
    with pytest.raises(FolderError, match="weights"):
        evaluate(small_config(save_model(tmp_path / "student", seed=7)), folder)
    with pytest.raises(FolderError, match=r"responses to another set 'addition'.*\n.*5 there, 4"):
        evaluate(small_config(model, **{"sets.addition": 4}), folder)


def test_more_sets_may_join(model, whole, tmp_path):
    first = evaluate(small_config(model), tmp_path)
    own = tmp_path / "own.jsonl"
    own.write_text('{"id": "a", "problem": "12+34=", "answer": 46}\n')
    calls: list = []
    both = evaluate(
        small_config(model, **{"sets.own": f"sums={own}"}), tmp_path, make=counting(calls)
    )
    assert len(calls) == 1
    assert both["sets"]["addition"] == first["sets"]["addition"]
    assert both["sets"]["sums"]["problems"] == 1
    means = [result["mean"]["value"] for result in both["sets"].values()]
    assert both["average"]["mean"]["value"] == pytest.approx(np.mean(means))


def test_a_damaged_line_inside_is_an_error_with_its_number(model, tmp_path):
    evaluate(small_config(model), tmp_path)
    file = tmp_path / "responses" / "addition.jsonl"
    good = file.read_text().splitlines()

    def write(changed):
        file.write_text("\n".join(changed) + "\n")

    write([*good[:3], "{", *good[4:]])
    with pytest.raises(ResponsesError, match="line 4: not a response"):
        evaluate(small_config(model), tmp_path)
    write([*good, good[0]])
    with pytest.raises(ResponsesError, match=r"line 21: .* stands there twice"):
        evaluate(small_config(model), tmp_path)
    write([good[0].replace("addition:", "other:")])
    with pytest.raises(ResponsesError, match="line 1: problem 'other:"):
        evaluate(small_config(model), tmp_path)


def test_batches_are_of_equal_size():
    assert [batch_size(rows, 512) for rows in (1, 512, 513, 1200)] == [1, 512, 257, 400]


@pytest.fixture(scope="module")
def run_folder(model, tmp_path_factory):
    """The folder of a training run with checkpoints of the steps 1 and 2, and a torn one."""
    folder = tmp_path_factory.mktemp("run")
    optimizer = make_optimizer(
        learning_rate=1e-3, b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.0, clip_norm=1.0
    )
    checkpoints = Checkpoints(folder / "checkpoints", keep=5)
    for step in (1, 2, 3):
        weights = load(find(save_model(folder / f"weights{step}", seed=step)), dtype=np.float32)
        checkpoints.save(step, init_state(weights.params, optimizer), {"step": step})
    checkpoints.close()
    (folder / "checkpoints" / "3" / "sizes.json").unlink()
    settings = {"method": "saki", "student": str(model), "teacher": str(model)}
    settings |= {"rollout.end_ids": [], "data.template": "raw", "data.instruction": ""}
    settings |= {"data.enable_thinking": False}
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def test_a_runs_checkpoint_gives_what_its_weights_give(run_folder, tmp_path):
    config = small_config(run_folder, template="auto", instruction="unused")
    assert session.default_workdir(config) == run_folder / "evals" / "step_000002"
    newest = evaluate(config, tmp_path / "run")
    exported = evaluate(small_config(run_folder / "weights2"), tmp_path / "folder")
    assert lines(tmp_path / "run") == lines(tmp_path / "folder")
    assert newest["protocol"]["method"] == "saki"
    assert newest["protocol"]["step"] == 2
    assert newest["sets"] == exported["sets"]
    evaluate(small_config(run_folder, step=1), tmp_path / "one")
    evaluate(small_config(run_folder / "checkpoints" / "1"), tmp_path / "by_path")
    assert lines(tmp_path / "one") == lines(tmp_path / "by_path") != lines(tmp_path / "run")


def test_weights_of_a_run_are_cast_and_laid_out_as_they_are_read(run_folder):
    mesh = session.make_mesh(2, 2, 2)
    subject = load(find(run_folder), dtype="bfloat16", mesh=mesh)
    leaves = jax.tree.leaves(subject.params)
    assert {str(leaf.dtype) for leaf in leaves} == {"bfloat16"}
    assert all(leaf.sharding.mesh.shape == mesh.shape for leaf in leaves)


@pytest.mark.parametrize(
    ("changes", "error", "told"),
    [
        ({"checkpoint": ""}, ConfigError, "checkpoint is empty"),
        ({"checkpoint": "nowhere"}, SubjectError, r"nowhere/config\.json is missing"),
        ({"step": 5}, SubjectError, "a step is given"),
        ({"sets.addition": 0}, ConfigError, "no evaluation set is named"),
        ({"sets.math500": "gone.jsonl"}, DataError, "no such file"),
        ({"sets.own": "gone.jsonl"}, ConfigError, "expected NAME=FILE"),
        ({"samples": 0}, ConfigError, "samples is 0; it must be at least 1"),
        ({"template": "cat"}, ConfigError, "must be one of auto, raw, chat"),
    ],
)
def test_wrong_wishes_are_told_before_anything_runs(model, tmp_path, changes, error, told):
    with pytest.raises(error, match=told):
        evaluate(small_config(model, **changes), tmp_path, make=killed_after(0))
    assert not (tmp_path / "protocol.json").exists()


def test_folders_that_hold_no_model_are_refused(run_folder, tmp_path):
    with pytest.raises(SubjectError, match=r"step 3, only of \[1, 2\]"):
        find(run_folder, step=3)
    (tmp_path / "config.json").write_text('{"steps": 3}')
    with pytest.raises(SubjectError, match="neither a Hugging Face folder"):
        find(tmp_path)


def test_the_command(model, tmp_path):
    own = tmp_path / "own.jsonl"
    own.write_text('{"id": "a", "problem": "12+34=", "answer": 46}\n')

    def run(*arguments):
        command = [sys.executable, "-m", "saki_jax.evals", "--config", "configs/eval.py"]
        return subprocess.run(
            [*command, f"--config.checkpoint={model}", *arguments],
            capture_output=True,
            text=True,
            cwd=ROOT,
        )

    out = tmp_path / "out"
    done = run(
        f"--config.sets.own=sums={own}",
        "--config.template=raw",
        "--config.instruction=",
        "--config.max_new_tokens=4",
        f"--workdir={out}",
    )
    assert done.returncode == 0, done.stderr
    assert "| sums | 1 |" in done.stdout
    assert len(lines(out, "sums")) == 8
    refused = run(f"--workdir={out}")
    assert refused.returncode == 1
    assert "error: no evaluation set is named" in refused.stderr
    assert "Traceback" not in refused.stderr
    misspelt = run("--config.sampels=4")
    assert misspelt.stderr.strip().endswith(
        "no key sampels in the configuration; the nearest is samples"
    )
