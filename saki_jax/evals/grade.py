r"""Grading of one response: find the boxed answer, compare it with the gold answer.

Standard library only, so that it can run in any process. The rules, the same for training
statistics and evaluation:

- Only what follows the last ``</think>`` counts.
- The last ``\boxed`` or ``\fbox`` that was *opened* decides. Unclosed or empty it earns nothing;
  no earlier box steps in for it. ``\boxed 7`` (a bare number or single letter) is an opened box,
  the mere mention of the command in prose is not.
- Answers are compared as `compare.same_answer` says.

`grader.MathVerifyGrader` adds algebra (extra ``eval``). Responses made elsewhere are graded by

    python -m saki_jax.evals.grade IN.jsonl OUT.jsonl      # fields gold, response; adds verdict
"""

import re
import sys
from collections.abc import Callable, Sequence
from enum import StrEnum

from saki_jax.data.answer_format import BOX_COMMANDS, THINK_END
from saki_jax.evals.compare import same_answer
from saki_jax.evals.typography import braced, normalise


class Verdict(StrEnum):
    """Outcome of grading a response."""

    CORRECT = "correct"
    INCORRECT = "incorrect"
    NO_ANSWER = "no_answer"
    TIMEOUT = "timeout"  # the algebra system was killed over it: not credited, counted apart


_OPENED = re.compile(
    "(?:" + "|".join(map(re.escape, BOX_COMMANDS)) + r")(?![A-Za-z])\s*"
    r"(?:(?P<brace>\{)|(?P<bare>[-+]?\d+(?:\.\d+)?|[A-Za-z](?![A-Za-z'])))"
)


def extract_boxed(text: str) -> str | None:
    r"""The content of the last box opened after any ``</think>``, or None when there is none.

    None also when that box is unclosed or blank. Braces are counted, escaped ones are text.

    >>> extract_boxed(r"first \boxed{12}, no: \boxed{\frac{1}{2}}"), extract_boxed(r"\boxed{3")
    ('\\frac{1}{2}', None)
    """
    text = text.rpartition(THINK_END)[2]
    opened = None
    for opened in _OPENED.finditer(text):  # noqa: B007 - the last match is wanted
        pass
    if opened is None:
        return None
    if opened["bare"]:
        return opened["bare"]
    content = braced(text, opened.end())
    return content.strip() or None if content is not None else None


def grade(*, gold: str, response: str, same: Callable[..., bool | None] = same_answer) -> Verdict:
    """Judges a response. Keyword arguments only: the two must not change places (case M11).

    Args:
      gold: the gold answer.
      response: the whole text of the response.
      same: ``(*, gold, answer) -> bool``, or None where it gave up.

    Raises:
      ValueError: when the gold answer is empty, which is a fault of the data.
    """
    if not gold.strip():
        raise ValueError("the gold answer is empty; such a problem must be refused when it is read")
    answer = extract_boxed(response)
    if answer is None or not normalise(answer):
        return Verdict.NO_ANSWER
    equal = same(gold=gold, answer=answer)
    if equal is None:
        return Verdict.TIMEOUT
    return Verdict.CORRECT if equal else Verdict.INCORRECT


def grade_all(pairs: Sequence[tuple[str, str]]) -> list[Verdict]:
    """Verdicts of (gold, response) pairs, in their order."""
    return [grade(gold=gold, response=response) for gold, response in pairs]


if __name__ == "__main__":
    from saki_jax.evals.grade_file import main

    sys.exit(main(sys.argv[1:]))
