"""What a probe is built from: the settings of a run, changed by the command line."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from saki_jax.data import addition
from saki_jax.data.prompts import Problem, read_jsonl
from saki_jax.data.template import EncodedPrompts, PromptFormat, encode_prompts
from saki_jax.evals.checkpoint import Subject
from saki_jax.evals.folder import read_json
from saki_jax.evals.probe_file import ProbeError

_ADDITION_SEED = 0


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """What to roll out: the run's own settings, changed by the command line.

    Raises:
      ProbeError: a model or the prompts are named by neither.
    """
    run = read_json(Path(options.run) / "config.json") if options.run else {}
    found = {
        "student": options.student or run.get("student"),
        "teacher": options.teacher or run.get("teacher"),
        "data": options.data or run.get("data.path"),
        "problem_field": run.get("data.problem_field", ""),
        "answer_field": run.get("data.answer_field", ""),
        "addition": options.addition,
        "digits": tuple(run.get("data.digits", addition.DIGITS)),
        "template": options.template or run.get("data.template", "chat"),
        "instruction": run.get("data.instruction", PromptFormat().instruction)
        if options.instruction is None
        else options.instruction,
        "enable_thinking": run.get("data.enable_thinking", False),
        "max_prompt_length": run.get("data.max_prompt_length", 1024),
        "response_length": options.response_length or run.get("rollout.response_length", 7168),
        "block_size": run.get("rollout.block_size", 8),
        "end_ids": run.get("rollout.end_ids", ()),
        "mask_unused_rows": options.mask_unused_rows or run.get("mask_unused_rows", False),
    }
    if run.get("data.source") == "addition" and not options.data:
        found["addition"] = found["addition"] or run["data.problems"]
    for name in ("student", "teacher"):
        if not found[name]:
            raise ProbeError(f"no {name} is named; give --{name} DIR, or --run RUN")
    if not found["data"] and not found["addition"]:
        raise ProbeError("no prompts are named; give --data FILE, --addition N or --run RUN")
    return found


def encode(settings: Mapping[str, Any], student: Subject) -> EncodedPrompts:
    """The prompts that the settings name, in the student's tokens."""
    problems: list[Problem]
    if settings["addition"]:
        problems = addition.problems(
            settings["addition"], held_out=True, seed=_ADDITION_SEED, digits=settings["digits"]
        )
    else:
        problems = read_jsonl(
            settings["data"],
            problem_field=settings["problem_field"],
            answer_field=settings["answer_field"],
        )
    prompt_format = PromptFormat(
        settings["template"], settings["instruction"], settings["enable_thinking"]
    )
    return encode_prompts(
        problems, student.tokenizer, prompt_format, max_length=settings["max_prompt_length"]
    )
