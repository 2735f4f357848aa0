r"""Exact values of the numbers people write as answers. Standard library only.

`value` reads integers, decimals, scientific notation, fractions, mixed numbers, powers, factorials,
binomials and arithmetic of them into a `Fraction`, the whole text or nothing: a text that is only
partly understood has no value (case M02: 4 is not ``4\sqrt{2}``). Every size is bounded before
anything is computed, so no answer can hold the process up.
"""

import re
from dataclasses import dataclass
from fractions import Fraction
from math import comb, factorial, isqrt

MAX_DIGITS = 4000  # of a literal; Python itself refuses to convert more than 4300
MAX_BITS = 1 << 15  # of any intermediate numerator or denominator
MAX_TOKENS = 400
MAX_DEPTH = 40
MAX_FACTORIAL = 2500

_TOKEN = re.compile(
    r"""\s*(?:
      (?P<number>(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)
    | (?P<command>\\(?:frac|sqrt|binom|cdot|times|div))(?![A-Za-z])
    | (?P<sign>[-+*/^!(){}\[\]])
    )""",
    re.VERBOSE | re.ASCII,
)
_OPERATORS = {"\\cdot": "*", "\\times": "*", "\\div": "/"}
_CLOSING = {"(": ")", "{": "}", "[": "]"}


class _NoValue(Exception):
    """The text is not a number of the kinds read here."""


class _TooLarge(_NoValue):
    """It is one, but beyond the bounds above."""


@dataclass(frozen=True)
class Number:
    """An exact value and how it was written.

    Attributes:
      exact: the value.
      decimal: a decimal point stands in the text, so the value may be a rounded one.
    """

    exact: Fraction
    decimal: bool


def value(text: str) -> Number | None:
    r"""The exact value of a normalised text (see `typography.normalise`), or None.

    >>> value(r"3\frac{1}{2}").exact, value(r"2 \cdot 10^{3}").exact, value(r"4\sqrt{2}")
    (Fraction(7, 2), Fraction(2000, 1), None)
    """
    try:
        parser = _Parser(_tokens(text))
        result = parser.sum(0)
        parser.expect_end()
    except _NoValue:
        return None
    return Number(result, "." in text)


def is_too_large(text: str) -> bool:
    """Whether a text is a number beyond the bounds, such as a tower of powers."""
    try:
        _Parser(_tokens(text)).sum(0)
    except _NoValue as reason:
        return isinstance(reason, _TooLarge)
    return False


def _tokens(text: str) -> list[str]:
    found, at, text = [], 0, text.strip()
    while at < len(text):
        match = _TOKEN.match(text, at)
        if not match:
            raise _NoValue
        if len(found) >= MAX_TOKENS:
            raise _TooLarge
        token = match.group().strip()
        found.append(_OPERATORS.get(token, token))
        at = match.end()
    return found


def _bounded(number: Fraction) -> Fraction:
    if max(number.numerator.bit_length(), number.denominator.bit_length()) > MAX_BITS:
        raise _TooLarge
    return number


class _Parser:
    """Recursive descent over the tokens; each method reads one level of precedence."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._at = 0

    def expect_end(self) -> None:
        if self._at < len(self._tokens):
            raise _NoValue

    def sum(self, depth: int) -> Fraction:
        if depth > MAX_DEPTH:
            raise _TooLarge
        total = self._product(depth)
        while self._peek() in ("+", "-"):
            sign = 1 if self._take() == "+" else -1
            total = _bounded(total + sign * self._product(depth))
        return total

    def _product(self, depth: int) -> Fraction:
        result = self._signed(depth)
        while True:
            token = self._peek()
            if token in ("*", "/"):
                self._take()
                factor = self._signed(depth)
                result = _divide(result, factor) if token == "/" else _bounded(result * factor)
            elif token in ("(", "[", "{", "\\frac", "\\sqrt", "\\binom"):
                result = _bounded(result * self._power(depth))
            else:
                return result

    def _signed(self, depth: int) -> Fraction:
        sign = 1
        while self._peek() in ("+", "-"):
            sign *= 1 if self._take() == "+" else -1
        return sign * self._power(depth)

    def _power(self, depth: int) -> Fraction:
        base = self._atom(depth)
        while self._peek() == "!":
            self._take()
            if base.denominator != 1 or base < 0:
                raise _NoValue
            if base > MAX_FACTORIAL:
                raise _TooLarge
            base = Fraction(factorial(int(base)))
        if self._peek() != "^":
            return base
        self._take()
        sign = -1 if self._peek() == "-" else 1
        if sign < 0:
            self._take()
        # Unlike TeX, 2^10 is read as people mean it; only \frac and \sqrt take single digits.
        return _raise(base, sign * self._atom(depth + 1))

    def _atom(self, depth: int) -> Fraction:
        token = self._take()
        if token in _CLOSING:
            return self._closed(token, depth)
        if token == "\\frac":
            return _divide(self._argument(depth), self._argument(depth))
        if token == "\\binom":
            n, k = self._argument(depth), self._argument(depth)
            if n.denominator != 1 or k.denominator != 1 or not 0 <= k <= n:
                raise _NoValue
            if n > MAX_FACTORIAL:
                raise _TooLarge
            return Fraction(comb(int(n), int(k)))
        if token == "\\sqrt":
            return _root(self._argument(depth))
        whole = _literal(token)
        if self._peek() == "\\frac" and whole.denominator == 1 and "." not in token:
            return whole + self._mixed_part(depth)
        return whole

    def _mixed_part(self, depth: int) -> Fraction:
        """The fraction of a mixed number; like every reader of answers, 3 1/2 is not 3 * 1/2."""
        self._take()
        part = _divide(self._argument(depth), self._argument(depth))
        if not 0 < part < 1:
            raise _NoValue
        return part

    def _argument(self, depth: int) -> Fraction:
        """A braced group, or as in TeX the next single token (one digit of a number)."""
        token = self._take()
        if token == "{":
            return self._closed(token, depth)
        if not token.isdigit():
            raise _NoValue
        if token[1:]:
            self._at -= 1
            self._tokens[self._at] = token[1:]
        return Fraction(int(token[0]))

    def _closed(self, opening: str, depth: int) -> Fraction:
        inside = self.sum(depth + 1)
        if self._take() != _CLOSING[opening]:
            raise _NoValue
        return inside

    def _peek(self) -> str | None:
        return self._tokens[self._at] if self._at < len(self._tokens) else None

    def _take(self) -> str:
        token = self._peek()
        if token is None:
            raise _NoValue
        self._at += 1
        return token


def _literal(token: str) -> Fraction:
    mantissa, _, exponent = token.lower().partition("e")
    if not token[0].isdigit() and token[0] != ".":
        raise _NoValue
    if len(token) > MAX_DIGITS or (exponent and abs(int(exponent)) > MAX_DIGITS):
        raise _TooLarge
    return _bounded(Fraction(mantissa) * Fraction(10) ** int(exponent or 0))


def _divide(a: Fraction, b: Fraction) -> Fraction:
    if b == 0:
        raise _NoValue
    return _bounded(a / b)


def _raise(base: Fraction, exponent: Fraction) -> Fraction:
    """base^exponent for integer exponents whose result is within bounds."""
    if exponent.denominator != 1 or (base == 0 and exponent <= 0):
        raise _NoValue
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if abs(exponent) * bits > MAX_BITS and abs(base) != 1:
        raise _TooLarge
    if abs(base) == 1:
        return base if int(exponent) % 2 else base * base
    return base ** int(exponent)


def _root(number: Fraction) -> Fraction:
    """The square root where it is rational."""
    if number < 0:
        raise _NoValue
    root = Fraction(isqrt(number.numerator), isqrt(number.denominator))
    if root * root != number:
        raise _NoValue
    return root
