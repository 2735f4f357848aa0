"""Exact values of answers: what has one, what has none, and that nothing can hold it up."""

import time
from fractions import Fraction

import pytest

from saki_jax.evals.exact import MAX_BITS, value


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("42", 42),
        ("-7", -7),
        ("+3", 3),
        ("--3", 3),
        (".5", Fraction(1, 2)),
        ("042", 42),
        ("4.5e33", 45 * 10**32),
        ("1e-3", Fraction(1, 1000)),
        (r"\frac{1}{2}", Fraction(1, 2)),
        (r"\frac34", Fraction(3, 4)),
        (r"\frac{1}{2^{99}}", Fraction(1, 2**99)),
        (r"-\frac{3}{4}", Fraction(-3, 4)),
        ("3/4", Fraction(3, 4)),
        ("1/2/2", Fraction(1, 4)),
        ("2+3*4", 14),
        ("2 - 3 - 4", -5),
        ("-2^2", -4),
        ("(-2)^2", 4),
        ("2^10", 1024),
        ("2^{10}", 1024),
        ("2^-1", Fraction(1, 2)),
        (r"2 \times 10^{22}", 2 * 10**22),
        (r"2 \cdot 3 \div 4", Fraction(3, 2)),
        (r"3\frac{1}{2}", Fraction(7, 2)),
        (r"2(3+4)", 14),
        ("5!", 120),
        (r"\binom{5}{2}", 10),
        (r"\sqrt{16}", 4),
        (r"\sqrt{\frac{4}{9}}", Fraction(2, 3)),
        (r"50(1 - \frac{1}{2^{101} - 1})", 50 - Fraction(50, 2**101 - 1)),
        ("3^{2025}", 3**2025),
        ("(-1)^{123456789}", -1),
    ],
)
def test_values(text, expected):
    assert value(text).exact == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        r"4\sqrt{2}",
        r"4\sqrt(2)",
        "1,2",
        "(1",
        "1)",
        "(1]",
        "1 2",
        "2x",
        "x=5",
        r"\pi",
        "1/0",
        r"\frac{1}{0}",
        "0^0",
        "0^{-1}",
        "2^{1/2}",
        "(-3)!",
        r"\binom{2}{3}",
        r"\sqrt{-4}",
        r"\sqrt[3]{8}",
        r"3\frac{5}{2}",
        "1..2",
        "\u0665",
    ],
)
def test_no_value(text):
    assert value(text) is None


@pytest.mark.parametrize(
    "text",
    [
        "9^{9^{9^{9}}}",
        "10^{10^{10}}",
        "100000!",
        "(10^9)!",
        "2500!!",
        "((9^9)^{9999})^{9999}",
        "1e999999999",
        "1e-999999999",
        "7" * 5000,
        "(" * 400 + "1" + ")" * 400,
        "{" * 5000 + "1" + "}" * 5000,
        "-" * 100000 + "1",
        "+".join(["2400!"] * 10000),
        "*".join(["2400!"] * 150),
        r"\frac{1}{" * 150 + "3" + "}" * 150,
        "^".join(["1"] * 390),
        "^".join(["2"] * 390),
        r"\binom{2400}{1200}" * 40,
    ],
    ids=range(18),
)
def test_m07_hostile_numbers_end_at_once(text):
    """Bounds are on sizes, so the time has an order of magnitude to spare."""
    start = time.process_time()
    found = value(text)
    assert time.process_time() - start < 2.0
    if found is not None:
        assert found.exact.numerator.bit_length() <= MAX_BITS


def test_a_written_point_is_remembered():
    assert value("0.50").decimal
    assert not value("1/2").decimal
