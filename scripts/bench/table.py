"""The result of a benchmark as text."""

from collections.abc import Mapping
from typing import Any

from bench.report import ENGINE
from bench.roofline import Rates

# What the paper's engine reached on its machines, at 64 x 8 responses.
PAPER_OVER_EXTERNAL, PAPER_RATIO = 4.22, 0.42


def table(result: Mapping[str, Any]) -> str:
    """The whole result as text."""
    lines = [
        f"preset {result['preset']}, commit {result['commit']}, {result['date']} UTC",
        machine_line(result),
    ]
    for batch, part in result["batches"].items():
        lines += ["", *_batch_lines(batch, part)]
    return "\n".join(lines)


def machine_line(result: Mapping[str, Any]) -> str:
    """Machine, its measured rates, and versions."""
    where, rates = result["machine"], Rates(**result["rates"])
    return (
        f"{where['processor']}, {where['cores']} cores, {where['device']}; copies "
        f"{rates.copy / 1e9:.1f} GB/s, reads {rates.read / 1e9:.1f} GB/s, multiplies "
        f"{rates.matmul / 1e9:.0f} GFLOP/s; "
        + ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    )


def _batch_lines(batch: str, part: Mapping[str, Any]) -> list[str]:
    lines = [
        f"batch {batch}: {part['rows']} responses, {part['tokens']} tokens, lengths "
        f"{part['lengths']['median']:.0f} (median) to {part['lengths']['longest']}, epsilon "
        f"{part['epsilon']:.3g}, mean TV {part['mean_tv']:.4f}",
        f"{'':22}{'tok/s':>10}{'(range)':>18}{'x student':>11}{'x external':>12}{'waves':>8}"
        f"{'a wave':>8}{'E':>7}{'corr.':>8}{'of roof':>9}",
    ]
    for name, c in part["contenders"].items():
        speed = c["tokens_per_second"]
        span = f"{speed['lowest']:.0f}–{speed['highest']:.0f}"
        lines.append(
            f"{name + ('' if c['complete'] else ' (cut)'):22}{speed['median']:>10.1f}{span:>18}"
            + _cell(c.get("ratio_to_student_only", {}).get("median"), 11, ".3f")
            + _cell(c.get("over_external", {}).get("median"), 12, ".2f")
            + _cell(c["waves"], 8, "d")
            + _cell(c.get("committed_per_row_wave"), 8, ".2f")
            + _cell(c.get("predicted_committed"), 7, ".2f")
            + _cell(c.get("correction_rate"), 8, ".2%")
            + _cell(c.get("share_of_roofline"), 9, ".0%")
        )
    return lines + _phase_lines(part)


def _phase_lines(part: Mapping[str, Any]) -> list[str]:
    lines = []
    phases = part["phases"]
    listed = ", ".join(f"{name} {1e3 * seconds:.2f}" for name, seconds in phases.items())
    lines.append(f"phases, ms: {listed}")
    if "wave" in part:
        wave = part["wave"]
        split = ", ".join(f"{n} {1e3 * wave[n]:.2f}" for n in wave if n not in ("sum", "measured"))
        lines.append(
            f"a wave of {ENGINE}, ms: {split}; sum {1e3 * wave['sum']:.2f}, "
            f"measured {1e3 * wave['measured']:.2f}"
        )
    for solver, figures in part["solvers"].items():
        lines.append(
            f"bridge by {solver}: {1e3 * figures['seconds']:.2f} ms a wave, "
            f"{figures['readings']:.0f} readings of the logits"
        )
    roof = part["roofline"]
    lines.append(
        f"roofline: student step {1e3 * roof['student_step_seconds']:.2f} ms; wave "
        f"{1e3 * roof['wave_seconds']:.2f} ms ({roof['wave_gigabytes']:.3f} GB, "
        f"{roof['wave_gigaflops']:.2f} GFLOP)"
    )
    memory = part["temporary_bytes"]
    lines.append("temporaries, MB: " + ", ".join(f"{k} {v / 1e6:.1f}" for k, v in memory.items()))
    if "exact_q" in part:
        q = part["exact_q"]
        over = (
            ""
            if q["over_external"] is None
            else (
                f"; over the external loop {q['over_external']:.2f} (paper {PAPER_OVER_EXTERNAL})"
            )
        )
        lines.append(
            f"exact-q: {q['ratio_to_student_only']:.3f} of student-only (paper {PAPER_RATIO}), "
            f"bound {q['bound']:.3f}, {q['share_of_bound']:.0%} of it{over}"
        )
    if part.get("tokens_equal_to_engine"):
        equal = ", ".join(f"{n} {v:.1%}" for n, v in part["tokens_equal_to_engine"].items())
        lines.append(f"tokens equal to {ENGINE}'s: {equal}")
    return lines


def _cell(value: float | None, width: int, form: str) -> str:
    return f"{'–' if value is None else format(value, form):>{width}}"
