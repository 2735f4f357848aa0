"""An evaluation from its configuration to its summary; `python -m saki_jax.evals` is the door."""

import logging
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from ml_collections import ConfigDict

from saki_jax.data.benchmarks import BENCHMARKS
from saki_jax.data.prompts import Problem
from saki_jax.data.template import EncodedPrompts, PromptFormat, encode_prompts
from saki_jax.evals import checkpoint, grader, results, tables
from saki_jax.evals.checkpoint import Source, Subject
from saki_jax.evals.config import AS_TRAINED, validate
from saki_jax.evals.folder import EvaluationFolder, read_json, write_json, write_text
from saki_jax.evals.graded import Scores, score_responses
from saki_jax.evals.problem_sets import problem_sets
from saki_jax.evals.responses import ResponseFile, complete
from saki_jax.models.qwen3 import default_compute_dtype
from saki_jax.models.sharding import make_mesh
from saki_jax.rollout.generate import make_generate
from saki_jax.rollout.keys import step_key
from saki_jax.rollout.spec import RolloutSpec

log = logging.getLogger(__name__)

_QUIET_SECONDS = 30.0  # between two lines of progress


def default_workdir(config: ConfigDict) -> Path:
    """Where results go when no folder is named: in the run's folder, or in ./evals."""
    source = checkpoint.find(config.checkpoint, step=config.step)
    step = source.identity["step"]
    if step is not None:
        return Path(source.identity["checkpoint"]) / "evals" / f"step_{step:06d}"
    return Path("evals") / source.folder.resolve().name


def run(config: ConfigDict, workdir: str | Path, *, make: Callable = make_generate) -> dict:
    """Evaluates the model on all sets named, going on with what is there already.

    Args:
      config: see `evals.config`.
      workdir: folder of the results.
      make: builds the generation of the student alone.

    Returns:
      The content of summary.json.

    Raises:
      ConfigError, SubjectError, DataError, FolderError, TokenizerError: what was asked for cannot
        be; nothing has been generated then.
      TeacherCalledError: a rollout counted teacher forwards.
    """
    validate(config)
    source = checkpoint.find(config.checkpoint, step=config.step)
    problems = problem_sets(config)
    mesh = make_mesh(**config.mesh)
    dtype = default_compute_dtype() if config.compute_dtype == "auto" else config.compute_dtype
    subject = checkpoint.load(
        source,
        end_ids=config.end_ids,
        dtype=jnp.dtype(dtype),
        mesh=mesh,
        masked=config.mask_unused_rows,
    )
    prompt_format = _prompt_format(config, source)
    encoded = {
        name: _encode(subject, prompt_format, found[: config.sets.limit or None])
        for name, found in problems.items()
    }
    whole = {name: len(encoded[name]) == len(found) for name, found in problems.items()}

    folder = EvaluationFolder(workdir)
    continued = folder.claim(_protocol(config, subject, prompt_format, str(jnp.dtype(dtype))))
    try:
        for name, prompts in encoded.items():
            folder.claim_set(name, {"problems": len(prompts), "prompts": prompts.fingerprint()})
        log.info("%s %s", "continuing in" if continued else "writing to", folder.path)
        spec = RolloutSpec(
            response_length=config.max_new_tokens,
            end_ids=subject.end_ids,
            pad_id=subject.tokenizer.pad_id,
            slots=config.slots,
            waves_per_call=config.waves_per_call,
        )
        generate = make(subject.model, spec, mesh)
        found: dict[str, dict] = {}
        for name, prompts in encoded.items():
            scores = _evaluate_set(config, folder, subject, generate, name, prompts)
            found[name] = results.set_result(
                scores,
                title=_title(name),
                whole=whole[name],
                resamples=config.resamples,
                name=name,
            )
            summary = _summary(config, folder, found, finished=len(found) == len(encoded))
        return summary
    finally:
        folder.release()


def _prompt_format(config: ConfigDict, source: Source) -> PromptFormat:
    if config.template != AS_TRAINED:
        return PromptFormat(config.template, config.instruction, config.enable_thinking)
    keys = ("data.template", "data.instruction", "data.enable_thinking")
    if source.run_config:
        return PromptFormat(*(source.run_config[key] for key in keys))
    return PromptFormat()


def _encode(
    subject: Subject, prompt_format: PromptFormat, problems: list[Problem]
) -> EncodedPrompts:
    # No cap: every problem of a set counts, however long its prompt is.
    return encode_prompts(
        problems,
        subject.tokenizer,
        prompt_format,
        max_length=subject.config.max_position_embeddings,
        too_long="error",
    )


def _protocol(
    config: ConfigDict, subject: Subject, prompt_format: PromptFormat, dtype: str
) -> dict[str, Any]:
    """All that the responses depend on, and the names under which tables show them."""
    identity = subject.source.identify()
    return {
        **{key: identity[key] for key in ("step", "weights")},
        "method": config.method or identity["method"],
        "student": config.student or identity["student"],
        "compute_dtype": dtype,
        "mask_unused_rows": subject.masked,
        "samples": config.samples,
        "max_new_tokens": config.max_new_tokens,
        "seed": config.seed,
        "end_ids": list(subject.end_ids),
        "template": prompt_format.template,
        "instruction": prompt_format.instruction,
        "enable_thinking": prompt_format.enable_thinking,
        "grader": grader.resolve(config.grader),
    }


def _evaluate_set(
    config: ConfigDict,
    folder: EvaluationFolder,
    subject: Subject,
    generate: Callable,
    name: str,
    prompts: EncodedPrompts,
) -> Scores:
    title = _title(name)
    file = ResponseFile(folder.responses(name), prompts, config.samples)
    log.info(
        "%s: %d problems x %d samples, %d there", title, len(prompts), config.samples, len(file)
    )
    with grader.open_grader(config.grader) as grade_all:
        responses = complete(
            file,
            generate,
            subject.params,
            prompts,
            subject.tokenizer,
            samples=config.samples,
            # Each set has noise of its own, whatever other sets are evaluated.
            key=step_key(config.seed, set_number(name)),
            batch_rows=config.batch_rows,
            grade_all=grade_all,
            on_batch=lambda done, rows: log.info("%s: %d of %d responses", title, done, rows),
            on_progress=_Progress(title),
        )
    return score_responses(responses, config.samples, subject.tokenizer)


def _title(name: str) -> str:
    return BENCHMARKS[name].title if name in BENCHMARKS else name


def set_number(name: str) -> int:
    """A number that names a set in keys: 31 bits of its name's hash."""
    return zlib.crc32(name.encode()) & 0x7FFFFFFF


def _summary(
    config: ConfigDict, folder: EvaluationFolder, sets: dict[str, dict], *, finished: bool
) -> dict:
    """Writes summary.json and summary.md over the sets evaluated so far."""
    summary = {
        "finished": finished,
        "checkpoint": config.checkpoint,
        "protocol": read_json(folder.protocol),
        "sets": sets,
        "average": results.average(sets, resamples=config.resamples),
    }
    write_json(folder.summary, summary)
    write_text(folder.table, tables.summary_table(summary).to_markdown())
    return summary


class _Progress:
    """Says now and then how far a batch is."""

    def __init__(self, title: str):
        self._title = title
        self._said = time.monotonic()

    def __call__(self, progress: Any) -> None:
        now = time.monotonic()
        if progress.rows_done == progress.rows_total or now - self._said >= _QUIET_SECONDS:
            self._said = now
            log.info(
                "%s: %d of %d rows of this batch, %d tokens",
                self._title,
                progress.rows_done,
                progress.rows_total,
                progress.committed,
            )
