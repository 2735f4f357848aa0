r"""Grading of one response: find the boxed answer, compare it with the gold answer.

Standard library only, so that it can run in any process. The rules, the same for training
statistics and evaluation:

- Only what follows the last ``</think>`` counts.
- The last ``\boxed`` or ``\fbox`` that was *opened* decides. Unclosed or empty it earns nothing;
  no earlier box steps in for it. ``\boxed 7`` (a bare number or single letter) is an opened box,
  the mere mention of the command in prose is not.
- Answers are compared as exact numbers where both are numbers (`exact.value`), else as texts after
  removing what is only typography.
"""

import re
from enum import StrEnum

from saki_jax.data.answer_format import BOX_COMMANDS, THINK_END
from saki_jax.evals import exact

RELATIVE_TOLERANCE = 1e-6
"""For a decimal against a fraction or another decimal. Integers are compared exactly."""


class Verdict(StrEnum):
    """Outcome of grading a response."""

    CORRECT = "correct"
    INCORRECT = "incorrect"
    NO_ANSWER = "no_answer"


_OPENED = re.compile(
    "(?:" + "|".join(map(re.escape, BOX_COMMANDS)) + r")(?![A-Za-z])\s*"
    r"(?:(?P<brace>\{)|(?P<bare>[-+]?\d+(?:\.\d+)?|[A-Za-z](?![A-Za-z'])))"
)
_WRAPPERS = (
    r"\\(?:text(?:bf|it|rm|normal)?|mathrm|mathbf|mathit|mathsf|boldsymbol|bm|mbox|operatorname)"
)
_UNIT = re.compile(rf"(?<=[\d}}])\s*{_WRAPPERS}\s*\{{([^{{}}]*)\}}\s*(\^\s*\{{?-?\d\}}?)?\s*$")
_SPACING = re.compile(r"(?:\\[,;: ]|~|\\q?quad(?![A-Za-z])|\s)+")
_DROPPED = re.compile(
    r"\\(?:left|right|bigl|bigr|Bigl|Bigr|big|Big|displaystyle|textstyle)(?![A-Za-z])"
    r"|\\!|\\\$|\$|\\[()\[\]]|\^\s*(?:\\circ|\{\s*\\circ\s*\})|°|\\degrees?(?![A-Za-z])"
)
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_ASSIGNED = re.compile(r"^[A-Za-z](?:_\{?\w+\}?)?\s*(?:=|\\in(?![a-z]))\s*(.+)$")
_CHAIN = re.compile(r"=|\\approx(?![a-z])")
_CHOICE = re.compile(r"^\(([A-Z])\)$")
_BASE = re.compile(r"^(\w+)_\d+$")


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
    content = _braced(text, opened.end())
    return content.strip() or None if content is not None else None


def grade(*, gold: str, response: str) -> Verdict:
    """Judges a response. Keyword arguments only: the two must not change places (case M11).

    Raises:
      ValueError: when the gold answer is empty, which is a fault of the data.
    """
    if not gold.strip():
        raise ValueError("the gold answer is empty; such a problem must be refused when it is read")
    answer = extract_boxed(response)
    if answer is None or not normalise(answer):
        return Verdict.NO_ANSWER
    return Verdict.CORRECT if same_answer(gold=gold, answer=answer) else Verdict.INCORRECT


def same_answer(*, gold: str, answer: str) -> bool:
    r"""Whether two answers are equal as exact numbers or as texts.

    >>> same_answer(gold="1/2", answer="0.5"), same_answer(gold="1/2^{99}", answer="1/2^{98}")
    (True, False)
    """
    gold_text, gold_unit = split_unit(gold)
    answer_text, answer_unit = split_unit(answer)
    if gold_unit and answer_unit and gold_unit != answer_unit:
        return False
    gold_text, answer_text = _same_form(normalise(gold_text), normalise(answer_text))
    return _same_percent(gold_text, answer_text) or _same_text(gold_text, answer_text)


def normalise(text: str) -> str:
    r"""Removes what is only typography: spacing, dollar signs, degree signs, ``\left``, fonts.

    >>> normalise(r"$\left(\dfrac{1}{2},\; 1{,}000\right)$."), normalise(r"\text{ even }")
    ('(\\frac{1}{2}, 1,000)', 'even')
    """
    text = re.sub(r"\\[dtc]frac(?![A-Za-z])", r"\\frac", text)
    text = text.replace("{,}", ",").replace("−", "-").replace("\\%", "%")
    text = re.sub(r",\\!\s*", ",", text)
    text = _DROPPED.sub("", text)
    text = re.sub(_WRAPPERS + r"\s*\{([^{}]*)\}", r"\1", text)
    text = _SPACING.sub(" ", text).strip().rstrip(".,;").strip()
    if not re.search(r"[(\[{]", text):
        text = _THOUSANDS.sub(lambda m: m.group().replace(",", ""), text)
    while text.startswith("{") and _braced(text, 1) == text[1:-1]:
        text = text[1:-1].strip()
    return text


def split_unit(text: str) -> tuple[str, str]:
    r"""Separates a unit written as text behind a number.

    >>> split_unit(r"12 \text{ cm}^2"), split_unit(r"\text{even}")
    (('12', 'cm^2'), ('\\text{even}', ''))
    """
    match = _UNIT.search(text)
    if not match:
        return text, ""
    unit = re.sub(r"[\s~{}]|\\[,;: ]", "", match.group(1) + (match.group(2) or ""))
    return text[: match.start()], unit.lower()


def _same_form(gold: str, answer: str) -> tuple[str, str]:
    """Drops ``x =``, a number base or a chain of equalities that only one side has."""
    gold_value, answer_value = _ASSIGNED.match(gold), _ASSIGNED.match(answer)
    if gold_value and not answer_value and "=" not in answer:
        gold = gold_value[1]
    elif answer_value and not gold_value and "=" not in gold:
        answer = answer_value[1]
    if not _CHAIN.search(gold):
        *steps, last = _CHAIN.split(answer)
        values = [exact.value(step) for step in steps]
        if "\\approx" in answer or (steps and all(_equal(v, exact.value(last)) for v in values)):
            answer = last.strip()
    based = _BASE.match(gold.replace("{", "").replace("}", ""))
    if based and "_" not in answer:
        gold = based[1]
    return gold, answer


def _same_percent(gold: str, answer: str) -> bool:
    """Equality as numbers; where one side has a percent sign, 50% is 50 and is 0.5."""
    g, a = exact.value(gold.rstrip("%")), exact.value(answer.rstrip("%"))
    if _equal(g, a):
        return True
    if g is None or a is None or gold.endswith("%") == answer.endswith("%"):
        return False
    whole, share = (g, a) if gold.endswith("%") else (a, g)
    return _equal(exact.Number(whole.exact / 100, whole.decimal), share)


def _equal(a: exact.Number | None, b: exact.Number | None) -> bool:
    if a is None or b is None:
        return False
    if a.exact == b.exact:
        return True
    integers = a.exact.denominator == 1 or b.exact.denominator == 1
    if integers or not (a.decimal or b.decimal):
        return False
    return abs(a.exact - b.exact) <= RELATIVE_TOLERANCE * max(abs(a.exact), abs(b.exact))


def _same_text(gold: str, answer: str) -> bool:
    """Equality of texts, blind to spaces, needless braces, and the case of words."""
    gold, answer = _plain(gold), _plain(answer)
    if gold == answer:
        return True
    words = re.fullmatch(r"[A-Za-z]{3,}", gold) and re.fullmatch(r"[A-Za-z]{3,}", answer)
    return bool(words) and gold.lower() == answer.lower()


def _plain(text: str) -> str:
    text = re.sub(r"(?<=[_^])\s*\{(\w)\}", r"\1", text)
    # Two digits with a space between are no number; other spaces mean nothing.
    text = _CHOICE.sub(r"\1", re.sub(r"\s+(?!\d)|(?<!\d)\s+", "", text))
    return text.replace("pmatrix", "matrix").replace("bmatrix", "matrix")


def _braced(text: str, start: int) -> str | None:
    """The text from ``start`` (just behind an open brace) to its closing brace, or None."""
    depth, at = 1, start
    while at < len(text):
        if text[at] == "\\":
            at += 2
            continue
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[start:at]
        at += 1
    return None
