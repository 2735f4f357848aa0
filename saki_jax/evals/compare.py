r"""Whether two answers are the same. Standard library only; algebra can be handed in.

Texts are normalised, taken apart (`forms`), and their elements compared: exact numbers exactly,
else as texts, else by the algebra function, if there is one and the element asks for it.
"""

import re
from collections.abc import Callable

from saki_jax.evals import exact, forms
from saki_jax.evals.typography import is_word, normalise, same_text, split_unit

RELATIVE_TOLERANCE = 1e-6
"""For a decimal against a fraction or another decimal. Integers are compared exactly."""

Algebra = Callable[[str, str], bool]
"""(gold, answer) -> equal, for two expressions that neither numbers nor texts decide."""

_ASSIGNED = re.compile(
    r"^[A-Za-z](?:_\{?\w+\}?)?(?:\([A-Za-z, ]+\))?\s*(?:=|\\in(?![a-z]))\s*(.+)$"
)
_CHAIN = re.compile(r"=|\\approx(?![a-z])")
_BASE = re.compile(r"^(\w+)_\d+$")
_MAX_DEPTH = 8


def same_answer(*, gold: str, answer: str, algebra: Algebra | None = None) -> bool:
    r"""Whether two answers are equal, form by form and element by element.

    >>> same_answer(gold="1/2", answer="0.5"), same_answer(gold="1/2^{99}", answer="1/2^{98}")
    (True, False)
    >>> same_answer(gold="1, 2", answer=r"\{2, 1\}"), same_answer(gold="(1,2)", answer="(2,1)")
    (True, False)
    """
    gold_text, gold_unit = split_unit(gold)
    answer_text, answer_unit = split_unit(answer)
    if gold_unit and answer_unit and gold_unit != answer_unit:
        return False
    return _same(normalise(gold_text), normalise(answer_text), algebra, 0)


def _same(gold: str, answer: str, algebra: Algebra | None, depth: int) -> bool:
    if depth > _MAX_DEPTH:
        return False
    gold, answer = _same_shape(gold, answer)
    if _same_number(gold, answer) or same_text(gold, answer):
        return True
    g, a = forms.read(gold), forms.read(answer)
    if g.kind != a.kind or g.marks != a.marks:
        g, a = forms.as_tuple(g), forms.as_tuple(a)
    if g.kind == a.kind == forms.SCALAR:
        return algebra is not None and _worth_algebra(gold, answer) and algebra(gold, answer)
    if (g.kind, g.marks, len(g.parts)) != (a.kind, a.marks, len(a.parts)):
        return False

    def same(x: str, y: str) -> bool:
        return _same(normalise(x), normalise(y), algebra, depth + 1)

    if g.kind == forms.ORDERED:
        return all(same(x, y) for x, y in zip(g.parts, a.parts, strict=True))
    left = list(a.parts)
    for x in g.parts:
        match = next((i for i, y in enumerate(left) if same(x, y)), None)
        if match is None:
            return False
        del left[match]
    return True


def _same_shape(gold: str, answer: str) -> tuple[str, str]:
    """Drops ``x =``, a number base or a chain of equalities that only one side has."""
    if len(forms.split(gold, ",")) == len(forms.split(answer, ",")) == 1:
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


def _same_number(gold: str, answer: str) -> bool:
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


_NO_ALGEBRA = re.compile(
    r"""__|["'`#@?:;&]                    # code, ratios, times
    |(?<![_^\d])\d+\s+\d                 # digits that do not belong together
    |\\(?:l|c|v)?dots(?![A-Za-z])|…       # something was left out
    |^[A-Za-z0-9]+_\{?\d+\}?$             # a number with its base
    |^[A-Z]{2,}$                          # points of a figure
    |\\(?:text|mathrm|mbox)(?![A-Za-z])""",
    re.VERBOSE,
)
_MAX_LENGTH = 400
_MAX_BRACKETS = 30


def _worth_algebra(gold: str, answer: str) -> bool:
    """Whether an algebra system may be asked: cheap refusals of what is decided or hostile.

    An integer as gold answer is decided: only an exact equal form is right (case M02).
    """
    number = exact.value(gold)
    if number is not None and (number.exact.denominator == 1 or exact.value(answer) is not None):
        return False
    if is_word(gold) or is_word(answer):
        return False
    if max(len(gold), len(answer)) > _MAX_LENGTH or exact.is_too_large(answer):
        return False
    if max(map(answer.count, "([{")) > _MAX_BRACKETS:
        return False
    return not (_NO_ALGEBRA.search(gold) or _NO_ALGEBRA.search(answer))
