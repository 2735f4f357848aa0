r"""A process that compares answers with algebra, so that it can be killed when an answer hangs it.

    python -m saki_jax.evals.math_verify_worker

Writes ``{"ready": true}``, then reads ``{"gold": .., "answer": ..}`` and writes
``{"same": true|false}``, one JSON object a line. Needs math-verify (extra ``eval``); imports
neither jax nor anything that does. Its memory is bounded, its time is the caller's business
(`grader.MathVerifyGrader`).

math-verify alone accepts too much: part of a text for the whole, tiny numbers as equal, equations
whose solutions it cannot compare. So the text is parsed whole or not at all, and a yes must survive
a numeric comparison of our own.
"""

import json
import random
import resource
import sys

import sympy
from latex2sympy2_extended.latex2sympy2 import (
    ConversionConfig,
    NormalizationConfig,
    latex2sympy,
    normalize_latex,
)
from math_verify import verify
from math_verify.grader import should_treat_as_complex

from saki_jax.evals.compare import RELATIVE_TOLERANCE, same_answer

MEMORY_BYTES = 2 << 30
_DIGITS = 60  # of numeric comparisons
_POINTS = 3  # random values of the variables

_WARM_UP = (
    (r"\frac{n(n+1)}{2}", r"\binom{n+1}{2}"),
    (r"I(0) e^{-\frac{t}{R C}}", r"I(0) e^{-t/(RC)}"),
    (r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt{3}}"),
    ("x - 2y = 3", "2x = 4y + 6"),
    (r"\sum_{k=0}^{n} k^2", r"\sum_{j=0}^{n} j^2"),
)

_NORMALISATION = NormalizationConfig(
    basic_latex=True,
    units=True,
    malformed_operators=True,
    nits=True,
    boxed="none",
    equations=False,
)
_CONVERSION = ConversionConfig(lowercase_symbols=False)


def same_expression(gold: str, answer: str) -> bool:
    """Whether two expressions or relations are equal; False for whatever cannot be parsed whole."""
    try:
        g, a = _parse(gold), _parse(answer)
        if isinstance(g, sympy.core.relational.Relational):
            return _same_relation(g, a)
        if not (isinstance(g, sympy.Expr) and isinstance(a, sympy.Expr)):
            return False
        if not _same_numerically(g, a):
            return False
        return verify(g, a, timeout_seconds=None) or sympy.simplify(g - a).is_zero is True
    except Exception:  # the libraries raise Exception itself for what they do not understand
        return False


def _parse(text: str) -> sympy.Basic:
    """The whole text as a sympy object; raises Exception where anything is left over."""
    return latex2sympy(
        normalize_latex(text, config=_NORMALISATION),
        is_real=not should_treat_as_complex(text),
        convert_degrees=False,
        normalization_config=None,
        conversion_config=_CONVERSION,
    )


def _same_relation(gold: sympy.Basic, answer: sympy.Basic) -> bool:
    """One relation is the other, multiplied by a number or turned round."""
    if not isinstance(answer, sympy.core.relational.Relational):
        return False
    if type(gold) is not type(answer):
        answer = answer.reversed
    if type(gold) is not type(answer):
        return False
    ratio = sympy.simplify((gold.lhs - gold.rhs) / (answer.lhs - answer.rhs))
    if not ratio.is_number or ratio.is_zero or not ratio.is_finite:
        return False
    return isinstance(gold, sympy.Eq | sympy.Ne) or bool(ratio > 0)


def _same_numerically(gold: sympy.Expr, answer: sympy.Expr) -> bool:
    """Whether nothing speaks against equality: values agree at random points, or have none."""
    if gold.free_symbols != answer.free_symbols:
        # A variable may cancel; a difference in what is left is caught below.
        gold, answer = sympy.simplify(gold), sympy.simplify(answer)
    draw = random.Random(0)
    symbols = sorted(gold.free_symbols | answer.free_symbols, key=str)
    tolerance = sympy.Float(10, _DIGITS) ** (-_DIGITS // 2)
    if gold.has(sympy.Float) or answer.has(sympy.Float):
        tolerance = RELATIVE_TOLERANCE
    for _ in range(_POINTS if symbols else 1):
        at = {s: sympy.Rational(draw.randint(100, 300), 97) for s in symbols}
        g, a = (sympy.N(e.subs(at), _DIGITS) for e in (gold, answer))
        if not (g.is_number and a.is_number):
            return True  # an unknown function has no value
        if not (g.is_finite and a.is_finite):
            return False
        if abs(g - a) > tolerance * max(abs(g), abs(a)):
            return False
    return True


def main() -> None:
    """Answers requests until the input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    out = sys.stdout
    sys.stdout = sys.stderr  # nothing that a library prints may stand among the answers
    for gold, answer in _WARM_UP:  # parsers and simplifiers are slow the first time
        same_expression(gold, answer)
    print(json.dumps({"ready": True}), file=out, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        same = same_answer(**request, algebra=same_expression)
        print(json.dumps({"same": same}), file=out, flush=True)


if __name__ == "__main__":
    main()
