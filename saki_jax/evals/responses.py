"""All responses of an evaluation in a file that survives being killed.

One JSON object a line, appended batch by batch and never changed::

    {"problem_id": .., "sample": 0, "gold": .., "text": .., "tokens": [..], "verdict": "correct",
     "finish_reason": "stop"}                      # or "length", or "nonfinite"

A process that dies leaves at most one torn line at the end, which is cut off before going on.
Since a response depends on seed, problem and sample alone, what is made again is what was lost.
"""

import json
import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import jax

from saki_jax.data.template import EncodedPrompts
from saki_jax.evals.evaluate import Generate, GradeAll, refuse_repeated_ids, respond
from saki_jax.evals.grade import Verdict, grade_all
from saki_jax.evals.graded import Response
from saki_jax.models.lm import Params
from saki_jax.models.tokenizer import Tokenizer

log = logging.getLogger(__name__)

STOP, LENGTH, NONFINITE = "stop", "length", "nonfinite"


class ResponsesError(ValueError):
    """A file of responses is damaged or belongs to another evaluation; names file and line."""


def finish_reason(response: Response) -> str:
    """Why a response ended: an end token, the length cap, or a model that emitted NaN."""
    if response.nonfinite:
        return NONFINITE
    return STOP if response.finished else LENGTH


def to_record(response: Response) -> dict:
    """The JSON object of a response, in evaluations of a run as in those of the command."""
    return {
        "problem_id": response.problem_id,
        "sample": response.sample,
        "gold": response.gold,
        "text": response.text,
        "tokens": list(response.tokens),
        "verdict": response.verdict.value,
        "finish_reason": finish_reason(response),
    }


def from_record(record: dict) -> Response:
    """The response of a JSON object; KeyError, TypeError or ValueError for any other object."""
    reason = record["finish_reason"]
    if reason not in (STOP, LENGTH, NONFINITE):
        raise ValueError(f"finish_reason is {reason!r}")
    return Response(
        problem_id=record["problem_id"],
        sample=int(record["sample"]),
        gold=record["gold"],
        tokens=tuple(record["tokens"]),
        text=record["text"],
        verdict=Verdict(record["verdict"]),
        finished=reason == STOP,
        nonfinite=reason == NONFINITE,
    )


class ResponseFile:
    """The responses to one set.

    Args:
      path: made when it is not there.
      encoded: the problems.
      samples: k.

    Raises:
      ResponsesError: a line before the last is damaged, repeats another, or answers a problem or
        sample that is not of this evaluation.
    """

    def __init__(self, path: str | os.PathLike, encoded: EncodedPrompts, samples: int):
        self.path = Path(path)
        self._samples = samples
        self._ids = dict.fromkeys(problem.id for problem in encoded.problems)  # in order
        self._found: dict[tuple[str, int], Response] = {}
        if self.path.exists():
            self._cut_torn_line()
            self._read()

    def __contains__(self, key: tuple[str, int]) -> bool:
        return key in self._found

    def __len__(self) -> int:
        return len(self._found)

    def in_order(self) -> list[Response]:
        """All responses, problem-major, whatever the order in the file."""
        keys = ((name, m) for name in self._ids for m in range(self._samples))
        return [self._found[key] for key in keys if key in self._found]

    def append(self, responses: Iterable[Response]) -> None:
        """Adds those that are not there yet, and waits until they are on the disk."""
        new = [r for r in responses if (r.problem_id, r.sample) not in self._found]
        lines = [json.dumps(to_record(r), ensure_ascii=False) for r in new]
        with open(self.path, "a", encoding="utf-8", newline="\n") as file:
            file.write("".join(line + "\n" for line in lines))
            file.flush()
            os.fsync(file.fileno())
        self._found |= {(r.problem_id, r.sample): r for r in new}

    def _cut_torn_line(self) -> None:
        data = self.path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            log.warning("%s: the last line is torn and is made again", self.path)
            os.truncate(self.path, whole)

    def _read(self) -> None:
        text = self.path.read_text("utf-8")
        for number, line in enumerate(text.split("\n")[:-1], start=1):
            try:
                response = from_record(json.loads(line))
            except (KeyError, TypeError, ValueError) as error:
                raise ResponsesError(
                    f"{self.path}, line {number}: not a response of an evaluation ({error!r}); "
                    "only the last line may be torn. Choose another folder or remove the file"
                ) from error
            key = (response.problem_id, response.sample)
            if response.problem_id not in self._ids or response.sample >= self._samples:
                raise ResponsesError(
                    f"{self.path}, line {number}: problem {key[0]!r}, sample {key[1]} is not part "
                    f"of this evaluation of {len(self._ids)} problems x {self._samples} samples"
                )
            if key in self._found:
                raise ResponsesError(f"{self.path}, line {number}: {key} stands there twice")
            self._found[key] = response


def batch_size(rows: int, most: int) -> int:
    """Rows a batch: equal parts of at most ``most``, so that little is generated for nothing.

    >>> batch_size(240, 512), batch_size(1000, 512)
    (240, 500)
    """
    batches = -(-rows // most)
    return -(-rows // batches)


def complete(
    file: ResponseFile,
    generate: Generate,
    params: Params,
    encoded: EncodedPrompts,
    tokenizer: Tokenizer,
    *,
    samples: int,
    key: jax.Array,
    batch_rows: int,
    grade_all: GradeAll = grade_all,
    on_batch: Callable[[int, int], None] | None = None,
    on_progress: Callable | None = None,
) -> list[Response]:
    """Generates the responses that the file lacks.

    The batches are the same whether the evaluation was interrupted or not: one with a response
    missing is run again whole, and of it only the missing ones are written.

    Args:
      file: see `ResponseFile`; made for the same problems and samples.
      generate, params, encoded, tokenizer, samples: as in `evaluate.evaluate`.
      key: of this set's evaluation.
      batch_rows: the most rows of a call.
      grade_all: judges the responses of a batch.
      on_batch: told (rows done, rows in all) after each batch.
      on_progress: handed to ``generate``.

    Returns:
      All responses, problem-major.
    """
    refuse_repeated_ids(encoded)
    rows = len(encoded) * samples
    size = batch_size(rows, batch_rows)
    for first in range(0, rows, size):
        inside = range(first, min(first + size, rows))
        if all((encoded.problems[r // samples].id, r % samples) in file for r in inside):
            continue
        file.append(
            respond(
                generate,
                params,
                encoded,
                tokenizer,
                samples=samples,
                key=key,
                first=first,
                size=size,
                grade_all=grade_all,
                on_progress=on_progress,
            )
        )
        if on_batch is not None:
            on_batch(inside.stop, rows)
    return file.in_order()
