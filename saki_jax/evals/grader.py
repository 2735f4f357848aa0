"""Grading with algebra in killable processes (extra ``eval``: math-verify).

    with MathVerifyGrader() as grader:
        verdict = grader(gold=r"5\\sqrt{5}", response=r"... \\boxed{\\sqrt{125}}")
        verdicts = grader.grade_all(pairs)              # the workers in parallel

What text and exact numbers decide is decided here, without asking. The rest goes to a worker that
is killed and replaced when it has not answered in time. No signal is used and nothing is forked:
workers are fresh interpreters, so threads and JAX do not matter.
"""

import contextlib
import importlib.util
import json
import logging
import os
import queue
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from saki_jax.evals.compare import same_answer
from saki_jax.evals.grade import Verdict, grade, grade_all

log = logging.getLogger(__name__)

GRADERS = ("auto", "exact", "math_verify")
LIMIT_SECONDS = 2.0  # for one answer, from a worker that is ready
START_SECONDS = 120.0  # for a worker to become ready; importing the library takes a second or two

GradeAll = Callable[[Sequence[tuple[str, str]]], list[Verdict]]

_MAX_REQUEST = 20_000  # characters; a pipe takes 65,536 bytes without a reader
_WORKER = "saki_jax.evals.math_verify_worker"
_ROOT = Path(__file__).resolve().parents[2]


class GraderError(RuntimeError):
    """The algebra library is missing, or its process does not start."""


def is_available() -> bool:
    """Whether math-verify is installed."""
    return importlib.util.find_spec("math_verify") is not None


def resolve(name: str) -> str:
    """What a grader's name means here; "auto" is "math_verify" where that is installed.

    Raises:
      GraderError: another name.
    """
    if name not in GRADERS:
        raise GraderError(f"grader is {name!r}; expected one of {', '.join(GRADERS)}")
    if name != "auto":
        return name
    return "math_verify" if is_available() else "exact"


@contextlib.contextmanager
def open_grader(name: str, workers: int = 2) -> Iterator[GradeAll]:
    """The function that grades (gold, response) pairs; its processes end with the context.

    Args:
      name: "exact": exact numbers and texts; "math_verify": algebra too; "auto": see `resolve`.
      workers: processes.
    """
    if resolve(name) == "exact":
        yield grade_all
        return
    with MathVerifyGrader(workers) as grader:
        yield grader.grade_all


class MathVerifyGrader:
    """`grade` with algebra; may be called from any thread.

    Args:
      workers: processes that compare at the same time.
      limit: seconds for one answer; then its worker is killed and the verdict is TIMEOUT.

    Raises:
      GraderError: math-verify is not installed, or a worker does not start.
    """

    def __init__(self, workers: int = 2, limit: float = LIMIT_SECONDS):
        if not is_available():
            raise GraderError(
                "math-verify is not installed; install the extra: pip install 'saki-jax[eval]', "
                "or grade without algebra (grader 'exact')"
            )
        self._limit = limit
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._workers = [_Worker() for _ in range(workers)]  # they start side by side
        try:
            for worker in self._workers:
                worker.wait_until_ready()
                self._idle.put(worker)
        except GraderError:
            self.close()
            raise

    def __call__(self, *, gold: str, response: str) -> Verdict:
        """As `grade.grade`, with Verdict.TIMEOUT where the worker was killed."""
        return grade(gold=gold, response=response, same=self._same)

    def grade_all(self, pairs: Sequence[tuple[str, str]]) -> list[Verdict]:
        """Verdicts of (gold, response) pairs, in their order."""
        with ThreadPoolExecutor(len(self._workers)) as pool:
            return list(pool.map(lambda pair: self(gold=pair[0], response=pair[1]), pairs))

    def close(self) -> None:
        """Ends the workers. The grader cannot be used afterwards."""
        for worker in self._workers:
            worker.kill()

    def __enter__(self) -> "MathVerifyGrader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _same(self, *, gold: str, answer: str) -> bool | None:
        """Equality, or None where the worker did not answer."""
        asked = threading.Event()

        def algebra(_: str, __: str) -> bool:
            asked.set()
            return False

        if same_answer(gold=gold, answer=answer, algebra=algebra):
            return True
        if not asked.is_set() or len(answer) > _MAX_REQUEST:
            return False
        worker = self._idle.get()
        try:
            same = worker.ask({"gold": gold, "answer": answer}, self._limit)
            if same is None:
                log.info("no answer within %g s; the worker is replaced", self._limit)
                worker.restart()
            return same
        finally:
            self._idle.put(worker)


class _Worker:
    """One process after another; used by one thread at a time."""

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
        self._process = subprocess.Popen(
            [sys.executable, "-m", _WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,  # nothing is left to be flushed into a process that has died
            env={**os.environ, "PYTHONPATH": path},
        )
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._process.stdout, selectors.EVENT_READ)

    def wait_until_ready(self) -> None:
        if self._read(START_SECONDS) != {"ready": True}:
            self.kill()
            raise GraderError(
                f"`{sys.executable} -m {_WORKER}` did not start within {START_SECONDS:g} s; run it "
                "by hand to see why"
            )

    def ask(self, request: dict, limit: float) -> bool | None:
        """The answer, or None when there is none in time or the process has died."""
        line = json.dumps(request) + "\n"
        try:
            self._process.stdin.write(line.encode())
        except BrokenPipeError:
            return None
        reply = self._read(limit)
        return None if reply is None else bool(reply["same"])

    def restart(self) -> None:
        self.kill()
        self._start()
        self.wait_until_ready()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._selector.close()
        self._process.stdin.close()
        self._process.stdout.close()

    def _read(self, seconds: float) -> dict | None:
        """The next line, or None at the end of the time or of the process."""
        deadline = time.monotonic() + seconds
        received = b""
        while not received.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not self._selector.select(left):
                return None
            chunk = os.read(self._process.stdout.fileno(), 65536)
            if not chunk:
                return None
            received += chunk
        return json.loads(received)
