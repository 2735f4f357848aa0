"""The script for a machine with an accelerator, on a CPU: all passes, and a fault is told."""

import json
import math
import time
from pathlib import Path

import check_accelerator
import jax
import pytest
from accelerator import randomness
from accelerator.findings import Finding, line, run


def checked(out: Path, *more: str) -> dict:
    """What the quick checks write; two CPU devices stand for accelerator and CPU."""
    code = check_accelerator.main(["--no-speed", "--quick", "--out", str(out), *more])
    return json.loads((out / "checks.json").read_text()) | {"code": code}


def every_check_passed(result: dict) -> None:
    assert result["device"] != result["reference"]
    assert [row for row in result["checks"] if not row["passed"]] == []
    assert result["code"] == 0


def test_some_of_every_kind_pass_on_a_cpu(tmp_path):
    kinds = ("keys", "uniforms", "draws", "bridge, V = 512", "log-prob", "law at epsilon 0")
    result = checked(tmp_path / "new", "--only", *kinds)
    every_check_passed(result)
    assert len(result["checks"]) == 3 + 4 + 2 + 1


@pytest.mark.slow
def test_every_check_passes_on_a_cpu(tmp_path):
    result = checked(tmp_path)
    every_check_passed(result)
    names = [row["name"] for row in result["checks"]]
    assert len(set(names)) == len(names) > 30


def test_a_broken_comparison_is_told_and_the_exit_code_is_1(monkeypatch, tmp_path, capsys):
    right = randomness.on

    def off_by_one(device, function, *arguments):
        return right(device, function, *arguments) + (device == jax.devices()[0])

    monkeypatch.setattr(randomness, "on", off_by_one)
    result = checked(tmp_path, "--only", "uniforms")
    (row,) = result["checks"]
    assert (row["passed"], result["code"]) == (False, 1)
    assert row["value"] == 100_000
    assert "FAILED uniforms" in capsys.readouterr().out


def test_nothing_checked_is_no_success(capsys):
    assert check_accelerator.main(["--no-speed", "--quick", "--only", "no such check"]) == 1


def test_a_check_that_raises_hides_no_other():
    def broken():
        raise RuntimeError("no\nkernel")

    checks = {"a": broken, "b": lambda: Finding(1.0, 2.0)}
    a, b = run(checks, time.monotonic() + 60)
    assert (a["passed"], a["note"]) == (False, "RuntimeError: no kernel")
    assert (b["passed"], b["bound"]) == (True, "<= 2")
    assert "FAILED" in line(a)
    assert line(b).startswith("ok")


def test_what_there_was_no_time_for_is_not_passed():
    (row,) = run({"late": lambda: Finding(0.0, 1.0)}, time.monotonic() - 1)
    assert not row["passed"]
    assert "time was over" in row["note"]


def test_bounds():
    assert Finding(1.0, 1.0).passed
    assert not Finding(1.1, 1.0).passed
    assert Finding(1.1, 1.0, at_least=True).passed
    assert not Finding(math.nan, 1.0).passed
    assert not Finding(math.nan, 1.0, at_least=True).passed


def test_checks_and_benchmark_run_one_after_the_other(monkeypatch):
    commands = []

    def child(command, deadline):
        commands.append(command)
        return 0

    monkeypatch.setattr(check_accelerator, "_child", child)
    assert check_accelerator.main(["--preset", "tiny", "--out", "there", "--minutes", "3"]) == 0
    checks, bench = commands
    assert checks[0].endswith("check_accelerator.py")
    assert checks[-1] == "--no-speed"
    assert bench[0].endswith("bench_rollout.py")
    assert bench[1:3] == ["--preset", "tiny"]
    monkeypatch.setattr(
        check_accelerator, "_child", lambda command, deadline: "bench" in command[0]
    )
    assert check_accelerator.main([]) == 1


def test_a_child_is_stopped_at_the_deadline(capsys):
    slow = ["-c", "import time; time.sleep(60)"]
    assert check_accelerator._child(slow, time.monotonic() + 0.1) == 1
    assert "the time was over" in capsys.readouterr().err


def test_a_process_without_cpu_is_told_what_to_set(monkeypatch):
    devices = jax.devices

    def none(backend=None):
        if backend == "cpu":
            raise RuntimeError("Unknown backend cpu")
        return devices()

    monkeypatch.setattr(jax, "devices", none)
    with pytest.raises(SystemExit, match="JAX_PLATFORMS=cpu,cpu"):
        check_accelerator.setting(quick=True)
