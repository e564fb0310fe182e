r"""math: what may be on the left of `=` if the right is the answer; relations solved for another letter; vectors.

Every pair is tested in both directions.
"""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from upshot.tasks.verifiers.math.mathematics import MathVerifier
from upshot.tasks.verifiers.math.names import NAME


def verdict(answer: str, truth: str) -> bool:
    return MathVerifier().score(f"so it is $\\boxed{{{answer}}}$.", truth, {}).value == 1


NAMES = [
    "x", "x'", "y''", "x_1", "x_{12}", "a_10", "a_{n-1}", "\\theta", "\\lambda_1", "\\ell", "AB", "ABCD", "A'B'",
    "P_1P_2", "\\overline{AB}", "[ABC]", "|A|", "|AB|", "\\angle ABC", "m\\angle A", "\\angle 1", "\\bar x",
    "\\Delta x", "f(x)", "f(-2)", "f'(3)", "f^{-1}(2)", "f(0.5)", "f(\\frac{1}{2})", "f(2,3)", "d(A,B)", "f(g(2))",
    "\\phi(12)", "P(A \\cup B)", "E[X]", "P(X>1)", "\\sin x", "\\tan\\theta", "\\log_2 8", "\\det A", "\\gcd(a,b)",
    "\\operatorname{Var}(X)", "\\operatorname{Area}", "\\text{Area}", "\\text{x-coordinate}",
]  # fmt: skip
ARITHMETIC = [
    "x-2", "n-1", "x-1.5", "x_{1}-2", "a_n-1", "ABC-2", "[ABC]-2", "\\theta-2", "\\overline{AB}-2", "\\angle A-2",
    "f(x)-2", "x+2", "-x", "x/2", "2x", "x2", "x 2", "x'2", "xy", "x y", "xyz", "x_1x_2", "\\alpha\\beta", "\\pi x",
    "x\\pi", "\\pi(2)", "\\overline{AB}2", "x^2", "x^{-1}", "x^{-1}y", "\\sqrt x", "\\sqrt{x}", "\\sum x", "x!", "|x|",
    "f x", "m\\sin x", "\\cos-2", "\\pi", "\\infty", "\\emptyset", "\\text{x-2}", "\\text{x - y}",
    "\\text{2x}", "\\text{x+2}",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_the_value_of_a_name_is_the_answer(name: str) -> None:
    equations = [f"{name}=5", f"{name} \\approx 5"]
    if "\\text" not in name:  # after a number it is a unit
        equations.append(f"5={name}")
    for equation in equations:
        assert verdict(equation, "5") and not verdict(equation, "6"), equation
    assert verdict("5", f"{name}=5") and not verdict("6", f"{name}=5")


@pytest.mark.parametrize("left", ARITHMETIC)
def test_the_value_of_an_arithmetic_expression_is_not_the_answer(left: str) -> None:
    for equation in (f"{left}=5", f"5={left}", f"{left} \\approx 5", f"{left}=4+1=5", f"{left}=5=5"):
        assert not verdict(equation, "5"), equation
        assert not verdict(equation, "x=5"), equation
    assert not verdict("5", f"{left}=5")
    assert not verdict(f"{left}=5, y=3", "(5,3)") and not verdict("(5,3)", f"{left}=5, y=3")


@settings(max_examples=200, deadline=None)
@given(st.sampled_from("xyzntkABPf"), st.sampled_from("+-"), st.integers(0, 99), st.integers(-99, 99))
def test_a_sum_is_never_a_name(letter: str, sign: str, number: int, value: int) -> None:
    for left in (f"{letter}{sign}{number}", f"{letter}_1{sign}{number}", f"{letter}'{sign}{number}"):
        assert not NAME.fullmatch(left)
        assert not verdict(f"{left}={value}", str(value)) and not verdict(str(value), f"{left}={value}")


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32))
def test_an_equation_is_itself_times_a_number(seed: int) -> None:
    rng = random.Random(seed)
    a, b, by = rng.randrange(2, 9), rng.randrange(1, 30), rng.choice([-3, -2, -1, 2, 5])
    for left in (f"x-{b}", f"{a}x+{b}"):
        first, second = f"{left}=0", f"{by}({left})=0"
        assert verdict(first, second) and verdict(second, first)
        assert not verdict(f"{left}-1=0", second) and not verdict("0", first)


BOTH_WAYS = [
    ("2x-4=0", "x-2=0", True),
    ("-x+2=0", "x-2=0", True),
    ("x-3=0", "x-2=0", False),
    ("0", "x-2=0", False),
    # solved for another letter
    ("x=2y", "y=\\frac{x}{2}", True),
    ("x=3-2y", "y=\\frac{3-x}{2}", True),
    ("C=\\frac{5}{9}(F-32)", "F=\\frac95C+32", True),
    ("x=y", "y=x", True),
    ("x=2y", "y=2x", False),
    ("x=y+1", "y=x+1", False),
    ("x=y^2", "y=\\sqrt{x}", False),
    ("x=5", "y=x", False),
    ("x=5", "y=5", False),
    # not solved at all
    ("x=2x", "2x", False),
    ("x=2x", "y=2x", False),
    ("x=x", "y=x", False),
    ("y=2x-y", "y=x", True),
    ("x^2=\\log x", "\\log x", False),
    ("x^2=\\log x", "\\ln x", False),
    ("xy=a_n", "a_n", False),
    ("y=\\log x", "\\log x", True),
    ("a_n=2^n", "2^n", True),
    # vectors and matrices times a number
    ("2\\langle 1,2\\rangle", "\\langle 2,4\\rangle", True),
    ("-\\langle 3,-2\\rangle", "\\langle -3,2\\rangle", True),
    ("\\frac12 \\cdot \\langle 2,4\\rangle", "(1,2)", True),
    ("\\langle 2,4\\rangle/2", "(1,2)", True),
    ("\\begin{pmatrix}2\\\\4\\end{pmatrix}/2", "\\begin{pmatrix}1\\\\2\\end{pmatrix}", True),
    ("2\\langle 1,2\\rangle", "\\begin{pmatrix}2\\\\4\\end{pmatrix}", True),
    ("\\mathbf{v}=2\\langle 1,2\\rangle", "\\langle 2,4\\rangle", True),
    ("2\\langle 1,2\\rangle", "\\langle 2,3\\rangle", False),
    ("2\\langle 1,2\\rangle", "\\langle 1,2\\rangle", False),
    ("-\\langle 3,-2\\rangle", "\\langle 3,-2\\rangle", False),
    ("\\begin{pmatrix}2\\\\4\\end{pmatrix}/2", "\\begin{pmatrix}2\\\\4\\end{pmatrix}", False),
    ("\\langle 0,0\\rangle/0", "\\langle 0,0\\rangle", False),
    ("\\langle 2,4\\rangle/2x", "(1,2)", False),
    ("3-1\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\begin{pmatrix}2\\\\4\\end{pmatrix}", False),
    ("5-2\\langle 1,2\\rangle", "(3,6)", False),
    ("(1+1)\\langle 1,2\\rangle", "(2,4)", False),
    ("f(1,2)", "(1,2)", False),
    ("2(1,2)", "[2,4]", False),
    ("2(1,2)", "\\{2,4\\}", False),
    ("2(1,2)", "2<x<4", False),
    ("2\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\begin{pmatrix}2&4\\end{pmatrix}", False),
]


@pytest.mark.parametrize(("one", "other", "equal"), BOTH_WAYS)
def test_pairs_get_the_same_verdict_in_both_directions(one: str, other: str, equal: bool) -> None:
    assert verdict(one, other) is equal and verdict(other, one) is equal
