"""Answers made of answers, and what algebra (extra `eval`: math-verify) adds."""

import pytest

from saki_jax.evals import forms
from saki_jax.evals.compare import same_answer
from saki_jax.evals.math_verify_worker import same_expression
from saki_jax.evals.typography import normalise

STRUCTURED = [
    ("(1,2)", "(1, 2)", True),
    ("(1,2)", "(2,1)", False),
    ("(1,2)", "[1,2]", False),
    ("(2,1)", "(3,1)", False),
    ("(0, 1)", "(0, 1.5)", False),
    ("1,2", "(1,2)", False),
    ("1,2,3", r"\{3,2,1\}", True),
    ("1,2,3", "1,2", False),
    ("1,2", "1,2,2", False),
    ("1,1,2", "1,2,2", False),
    (r"19, 46, \text{ and } 82", "82, 19, 46", True),
    (r"19, 46, \text{ and } 82", "21, 36, and 82", False),
    (r"1331 and 1728", "1728", False),
    ("1,-2", r"x=1 \text{ or } x=-2", True),
    ("(-3,4)", r"x=-3,\ y=4", True),
    ("(-3,4)", r"x=4,\ y=-3", False),
    (r"\pm 2", "-2, 2", True),
    (r"\pm 2021", "2021", False),
    (r"1\pm\sqrt{2}", r"1-\sqrt{2}, 1+\sqrt{2}", True),
    ("[1,2]", r"1 \le x \le 2", True),
    ("[1,2)", r"1 \leq x < 2", True),
    ("[1,2]", "1 < x < 2", False),
    (r"(-\infty, 2) \cup (3, \infty)", r"(3,\infty)\cup(-\infty,2)", True),
    (r"(-\infty, 2) \cup (3, \infty)", r"(-\infty,2)\cup[3,\infty)", False),
    ("(1,8,19), (2,7,13)", "(2,7,13),(1,8,19)", True),
    ("(1,8,19), (2,7,13)", "(1,8,19),(2,13,7)", False),
    (r"\begin{pmatrix} -1/3 \\ 2 \end{pmatrix}", r"\begin{bmatrix}-\frac13\\2\end{bmatrix}", True),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 1 & 2 \end{pmatrix}", False),
    (r"x \in [-2,7]", "[-2,7]", True),
    ("f(x)=x^2", "x^2", True),
    (r"\text{Alice and Bob}", r"\text{Bob and Alice}", True),
]  # fmt: skip


@pytest.mark.parametrize(("gold", "answer", "same"), STRUCTURED)
def test_structure_needs_no_algebra(gold, answer, same):
    assert same_answer(gold=gold, answer=answer) is same
    assert same_answer(gold=gold, answer=answer, algebra=same_expression) is same


EQUAL = [
    (r"5\sqrt{5}", r"\sqrt{125}"),
    (r"\frac{7}{3}\sqrt{3}", r"\frac{7}{\sqrt3}"),
    (r"(3+\sqrt{6})^{-1/3}", r"\frac{1}{\sqrt[3]{3+\sqrt{6}}}"),
    (r"2 - \frac{\pi}{2}", r"\frac{4-\pi}{2}"),
    ("2x^2+3x+1", "(2x+1)(x+1)"),
    (r"\frac{n(n+1)}{2}", r"\binom{n+1}{2}"),
    ("3+4i", "4i+3"),
    (r"(3, \sqrt{8})", r"(3, 2\sqrt{2})"),
    (r"\log_2 3", r"\frac{\ln 3}{\ln 2}"),
    ("y=2x+3", "2x-y+3=0"),
    ("x>2", "-x<-2"),
    (r"\sqrt{2}", "1.41421356"),
]


@pytest.mark.parametrize(("gold", "answer"), EQUAL)
def test_algebra_finds_what_is_equal(gold, answer):
    assert same_answer(gold=gold, answer=answer, algebra=same_expression)
    assert not same_answer(gold=gold, answer=answer)


DIFFERENT = [
    (r"\frac{\sqrt{2}}{2^{99}}", r"\frac{\sqrt{2}}{2^{98}}"),
    ("1/2^{99}", r"\frac{1}{2^{98}}"),
    ("3x-y+13=0", "3x+4y+14=0"),
    ("4", r"4\sqrt(2)"),
    (r"\sqrt{2}", r"4\sqrt{2}"),
    (r"\sqrt{2}", "1.41"),
    (r"\pi", "3.14"),
    ("x^2", "y^2"),
    ("|x|", "x"),
    (r"\sqrt{x^2}", "x"),
    ("x>2", "x<2"),
    ("x>2", "-x>-2"),
    ("x>2", r"x \ge 2"),
    ("9", "4 5"),
    (r"\frac{6}{7}", r"\frac{6}{7}\ldots"),
    ("AB", "BA"),
    ("x=5", "y=5"),
    ("12:00", "1:00"),
    (r"\infty", r"-\infty"),
    ("2516_8", "2516_9"),
    ("A", "B"),
    (r"a+b\sqrt{2}", r"a-b\sqrt{2}"),
    (r"F_n = \sum_{k=0}^{n-1} F_k", r"F_n = \sum_{k=0}^{n-2} F_k"),
    ("5", '__import__("os").getcwd()'),
    (r"\sqrt{2}", '__import__("os").getcwd()'),
    (r"1 - \frac{1}{\mathrm{e}}", r"1 + \frac{1}{\mathrm{e}}"),
]


@pytest.mark.parametrize(("gold", "answer"), DIFFERENT)
def test_m01_m02_algebra_accepts_nothing_that_differs(gold, answer):
    assert not same_answer(gold=gold, answer=answer, algebra=same_expression)


def test_m02_an_integer_is_decided_without_algebra():
    def refuse(gold, answer):
        raise AssertionError("algebra was asked")

    for answer in (r"4\sqrt{2}", r"\log_2 16", "x", "9^{9^{9}}", r"\int_0^1 x dx"):
        assert not same_answer(gold="4", answer=answer, algebra=refuse)


@pytest.mark.parametrize(
    "answer",
    [
        "9^{9^{9^{9}}}",
        "100000!",
        "(" * 300 + "1" + ")" * 300,
        "7" * 5000,
        "x+" * 300 + "x",
        "{" * 99,
    ],
)
def test_m07_hostile_answers_are_not_sent_to_algebra(answer):
    def refuse(gold, answer):
        raise AssertionError("algebra was asked")

    assert not same_answer(gold=r"\sqrt{2}", answer=answer, algebra=refuse)


def test_forms_do_not_come_apart_inside_brackets():
    assert forms.split(r"\{1, 2\}, (3, [4, 5))", ",") == [r"\{1, 2\}", "(3, [4, 5))"]
    assert forms.split("(1, 2", ",") == ["(1, 2"]
    assert forms.read("f(1, 2)").kind == forms.SCALAR
    assert forms.read("(1)(2, 3)").kind == forms.SCALAR
    assert forms.read(normalise(r"\frac{1}{2}")).kind == forms.SCALAR
    assert forms.read(",".join("1" * 100)).kind == forms.SCALAR


def test_deep_nesting_ends():
    nested = "(" * 40 + "1,2" + ",3)" * 40
    assert not same_answer(gold=nested, answer=nested.replace("1,2", "1,4"))
