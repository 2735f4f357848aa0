"""Grading with workers that can be killed. Needs math-verify (extra `eval`)."""

import json
import sys
import threading
import time
from pathlib import Path

import pytest

from saki_jax.evals import grader as grader_module
from saki_jax.evals.grade import Verdict
from saki_jax.evals.grade_file import main
from saki_jax.evals.grader import GraderError, MathVerifyGrader, open_grader, resolve

BANK = Path(__file__).parent / "golden" / "grading_bank.jsonl"
# Seconds of algebra for each of the eight, on any machine.
INTEGRALS = [rf"\int_0^{{\infty}} e^{{-x^2}}\sin(x^{{{n}}})\,dx" for n in range(3, 19, 2)]
HANG = (r"\sqrt{2}", rf"\boxed{{{'+'.join(INTEGRALS)}}}")
RADICAL = (r"5\sqrt{5}", r"\boxed{\sqrt{125}}")


@pytest.fixture(scope="module")
def grader():
    with MathVerifyGrader(workers=2, limit=10.0) as grader:
        yield grader


def test_the_bank(grader):
    """Of 163 pairs at least 159 right, and nothing wrong accepted."""
    rows = [json.loads(line) for line in BANK.read_text("utf-8").split("\n") if line]
    verdicts = grader.grade_all([(r["gold"], r["response"]) for r in rows if r["id"] != "g215"])
    expected = [r["expected"] for r in rows if r["id"] != "g215"]
    wrong = [pair for pair in zip(expected, verdicts, strict=True) if pair[0] != pair[1]]
    assert len(verdicts) == 162
    assert len(wrong) <= 3
    assert not [pair for pair in wrong if pair[1] is Verdict.CORRECT]
    assert not (Path.cwd() / "pwned_mv").exists()


def test_m06_four_threads_get_what_one_gets(grader):
    cases = [(RADICAL, Verdict.CORRECT), (("2x+2", r"\boxed{2(x+1)}"), Verdict.CORRECT),
             ((r"\sqrt{3}", r"\boxed{\sqrt{2}}"), Verdict.INCORRECT),
             (("7", r"\boxed{7}"), Verdict.CORRECT)] * 4  # fmt: skip
    found: dict[int, list[Verdict]] = {}

    def run(thread):
        found[thread] = [grader(gold=g, response=r) for (g, r), _ in cases]

    threads = [threading.Thread(target=run, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {n: [verdict for _, verdict in cases] for n in range(4)}


def test_m07_hostile_answers_among_normal_ones():
    """Each costs at most its limit and a new worker; the others are judged as ever."""
    normal = [RADICAL, ("1/2", r"\boxed{0.5}"), ("7", r"\boxed{8}")] * 20
    hostile = [
        (r"\sqrt{5}", r"\boxed{9^{9^{9^{9}}}}"),
        (r"\sqrt{5}", r"\boxed{100000!}"),
        (r"\sqrt{5}", r"\boxed{" + "(" * 300 + "1" + ")" * 300 + "}"),
        (r"\sqrt{5}", r"\boxed{" + "7" * 5000 + "}"),
        HANG,
    ]
    with MathVerifyGrader(workers=1, limit=2.0) as grader:
        verdicts = grader.grade_all([*normal[:30], *hostile, *normal[30:]])
        assert grader(gold=RADICAL[0], response=RADICAL[1]) is Verdict.CORRECT
    right = [Verdict.CORRECT, Verdict.CORRECT, Verdict.INCORRECT] * 20
    assert verdicts[:30] + verdicts[35:] == right
    assert verdicts[30:34] == [Verdict.INCORRECT] * 4
    assert verdicts[34] is Verdict.TIMEOUT


def test_the_worker_that_gave_no_answer_is_killed_and_replaced():
    with MathVerifyGrader(workers=1, limit=0.5) as grader:
        (worker,) = grader._workers
        first = worker._process
        start = time.monotonic()
        assert grader(gold=HANG[0], response=HANG[1]) is Verdict.TIMEOUT
        assert time.monotonic() - start >= 0.5
        assert first.poll() is not None
        assert worker._process.pid != first.pid
        assert worker._process.poll() is None
        last = worker._process
    assert last.poll() is not None


def test_a_worker_that_dies_is_replaced():
    with MathVerifyGrader(workers=1, limit=10.0) as grader:
        grader._workers[0]._process.kill()
        grader._workers[0]._process.wait()
        assert grader(gold=RADICAL[0], response=RADICAL[1]) is Verdict.TIMEOUT
        assert grader(gold=RADICAL[0], response=RADICAL[1]) is Verdict.CORRECT


def test_a_worker_that_does_not_start_is_an_error(monkeypatch):
    monkeypatch.setattr(grader_module, "_WORKER", "saki_jax.evals.no_such_worker")
    with pytest.raises(GraderError, match="no_such_worker` did not start"):
        MathVerifyGrader(workers=2)


def test_the_worker_loads_no_jax():
    code = (
        "import sys, saki_jax.evals.math_verify_worker;"
        "sys.exit('jax' in sys.modules or 'saki_jax.train' in sys.modules)"
    )
    done = grader_module.subprocess.run([sys.executable, "-c", code], cwd=grader_module._ROOT)
    assert done.returncode == 0


def test_without_the_library_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(grader_module, "is_available", lambda: False)
    with pytest.raises(GraderError, match=r"pip install 'saki-jax\[eval\]'"):
        MathVerifyGrader()


def test_graders_by_name(monkeypatch):
    with open_grader("exact") as grade_all:
        assert grade_all([RADICAL]) == [Verdict.INCORRECT]
    with open_grader("auto") as grade_all:
        assert grade_all([RADICAL]) == [Verdict.CORRECT]
    with pytest.raises(GraderError, match=r"grader is 'sympy'; expected one of auto, exact"):
        resolve("sympy")
    monkeypatch.setattr(grader_module, "is_available", lambda: False)
    assert resolve("auto") == "exact"


def test_a_file_of_responses_is_graded(tmp_path, capsys):
    rows = [
        {"gold": "5", "response": r"\boxed{5}", "id": "a"},
        {"gold": RADICAL[0], "response": RADICAL[1]},
        {"gold": "5", "response": r"\boxed{6}"},
        {"gold": "5", "response": "5"},
    ]
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main([str(source), str(out), "--workers=1"]) == 0
    graded = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row.pop("verdict") for row in graded] == [
        "correct",
        "correct",
        "incorrect",
        "no_answer",
    ]
    assert graded == rows
    assert "2 correct, 1 incorrect, 1 no_answer, 0 timeout" in capsys.readouterr().out
    assert "exists; name a new file" in main([str(source), str(out)])
    assert main([str(source), str(tmp_path / "exact.jsonl"), "--workers=0"]) == 0
    assert "1 correct, 2 incorrect" in capsys.readouterr().out


def test_m11_a_bad_row_is_named(tmp_path):
    source = tmp_path / "in.jsonl"
    for line, words in [
        ('{"gold": "", "response": "x"}', "line 2: the gold answer is empty"),
        ('{"gold": "5"}', "line 2: the field 'response' must be text, found None"),
        ('{"gold": "5", "response": ', "line 2: not one JSON object"),
    ]:
        source.write_text('{"gold": "5", "response": "x"}\n' + line + "\n")
        assert words in main([str(source), str(tmp_path / "out.jsonl"), "--workers=0"])
