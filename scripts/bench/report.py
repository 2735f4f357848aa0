"""Machine and versions, and the figures derived from the samples."""

import datetime
import importlib.metadata
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from bench.measure import Sample, middle
from bench.scenario import EXTERNAL, STUDENT_ONLY, without_teacher
from saki_jax.rollout.block_size import expected_commit

ENGINE = "engine_k8"  # the contender that stands for exact-q in the summary


def machine() -> dict[str, Any]:
    """Where this was measured."""
    device = jax.devices()[0]
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load_at_start": os.getloadavg()[0],
        "platform": platform.platform(),
        "backend": device.platform,
        "device": device.device_kind,
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def versions() -> dict[str, str]:
    """Of Python and the packages that decide the speed."""
    names = ("jax", "jaxlib", "flax", "numpy")
    found = {name: importlib.metadata.version(name) for name in names}
    return {"python": platform.python_version(), **found}


def commit() -> str:
    """The commit that was measured, marked where the tree differs from it."""
    command = [
        "git",
        "-C",
        str(Path(__file__).parent),
        "describe",
        "--always",
        "--dirty",
        "--abbrev=12",
    ]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def today() -> str:
    """UTC, to the minute."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M")


def told(name: str, sample: Sample) -> None:
    """A line for each run on stderr, so that an interrupted benchmark has said something."""
    speed = sample.committed / sample.seconds
    print(f"{name}: {sample.seconds:.1f} s, {speed:.0f} tokens/s", file=sys.stderr, flush=True)


def speed_bound(rate: float, block_size: int, student_step: float, teacher: float) -> float:
    """The ratio to student-only if a wave were drafting and the teacher's forward alone."""
    wave = block_size * student_step + teacher
    return expected_commit(rate, block_size) * student_step / wave


def describe(samples: Mapping[str, Sequence[Sample]], block_sizes: Mapping[str, int]) -> dict:
    """What each contender did: speed, waves and corrections, and its standing beside the others.

    Ratios are formed run by run, between neighbours in time, before the median is taken.
    """
    speeds = {name: [s.committed / s.seconds for s in runs] for name, runs in samples.items()}
    result = {}
    for name, runs in samples.items():
        last, size = runs[-1], block_sizes.get(name, 1)
        rate = last.corrections / max(last.committed, 1)
        guided = not without_teacher(name) and name in block_sizes
        figures: dict[str, Any] = {
            "tokens_per_second": middle(speeds[name]),
            "seconds": middle([s.seconds for s in runs]),
            "committed": last.committed,
            "complete": all(s.complete for s in runs),
            "waves": last.waves,
            "prefilled": last.prefilled,
        }
        if guided:
            figures |= {
                "block_size": size,
                "correction_rate": rate,
                "committed_per_row_wave": last.committed / last.row_waves
                if last.row_waves
                else None,
                "predicted_committed": expected_commit(rate, size),
            }
        for label, other in (("ratio_to_student_only", STUDENT_ONLY), ("over_external", EXTERNAL)):
            if other in speeds and name != other:
                pairs = zip(speeds[name], speeds[other], strict=True)
                figures[label] = middle([mine / theirs for mine, theirs in pairs])
        result[name] = figures
    return result


def exact_q(
    contenders: Mapping[str, dict], phases: Mapping[str, float], block_size: int
) -> dict[str, float | None]:
    """The summary of one batch size.

    The bound's student step is what the student-only run took a step without its prefills, the
    teacher's forward is its phase.
    """
    engine, alone = contenders[ENGINE], contenders[STUDENT_ONLY]
    step = student_step_seconds(alone)
    rate = engine["correction_rate"]
    bound = speed_bound(rate, block_size, step, phases["verify"])
    ratio = engine["ratio_to_student_only"]["median"]
    over = engine.get("over_external")
    return {
        "ratio_to_student_only": ratio,
        "bound": bound,
        "share_of_bound": ratio / bound,
        "over_external": None if over is None else over["median"],
        "correction_rate": rate,
        "student_step_seconds": step,
        "teacher_forward_seconds": phases["verify"],
    }


def student_step_seconds(alone: Mapping[str, Any]) -> float:
    """Seconds of a decode step in the student-only run, all included."""
    return alone["seconds"]["median"] / alone["waves"]


def wave_split(
    engine: Mapping[str, Any],
    phases: Mapping[str, float],
    rows: int,
    block_size: int,
    prefill_prompts: int,
) -> dict[str, float]:
    """Where the seconds of a wave go, by phases measured one by one, and what they do not explain.

    The residual draw is counted in the share of waves that have a rejection somewhere, the prefills
    in so many prompts each are spread over all waves.
    """
    some_rejection = 1 - (1 - engine["correction_rate"]) ** (rows * block_size)
    parts = {name: phases[name] for name in ("draft", "verify", "bridge", "commit")}
    parts["couple"] = phases["couple"] + some_rejection * phases["residual"]
    prefills = -(-engine["prefilled"] // prefill_prompts)
    parts["prefill"] = prefills * phases["prefill"] / engine["waves"]
    measured = engine["seconds"]["median"] / engine["waves"]
    return parts | {"sum": sum(parts.values()), "measured": measured}


def paired(names: Sequence[str], samples: Mapping[str, Sequence[Sample]]) -> None:
    """Checks that all who finished gave the same number of tokens.

    Raises:
      RuntimeError: lengths were not imposed on everybody alike; the figures could not be compared.
    """
    committed = {
        name: {s.committed for s in samples[name] if s.complete} for name in names if samples[name]
    }
    every = set().union(*committed.values())
    if len(every) > 1:
        raise RuntimeError(f"the contenders did not answer with equally many tokens: {committed}")


def median_length(lengths: Sequence[int]) -> dict[str, float]:
    """Of the responses."""
    return {
        "median": statistics.median(map(int, lengths)),
        "mean": statistics.fmean(map(int, lengths)),
        "longest": max(map(int, lengths)),
    }
