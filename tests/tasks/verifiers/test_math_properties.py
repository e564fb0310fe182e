"""math by kinds: equal values stay equal in any notation, and different ones never become equal."""

from __future__ import annotations

import random
from collections.abc import Callable
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from upshot.tasks.verifiers.math.equal import quick_verdict
from upshot.tasks.verifiers.math.mathematics import MathVerifier

Make = Callable[[random.Random], tuple[object, list[str]]]
"""Draws a value: what it is, and several ways to write it."""


def rational(rng: random.Random) -> tuple[object, list[str]]:
    value = Fraction(rng.randrange(-60, 60), rng.choice([1, 2, 3, 4, 5, 8, 11]))
    top, bottom, times = value.numerator, value.denominator, rng.randrange(2, 6)
    ways = [f"\\frac{{{top}}}{{{bottom}}}", f"{top}/{bottom}", f"-\\dfrac{{{-top * times}}}{{{bottom * times}}}"]
    ways += [f"x = \\frac{{{top * times}}}{{{bottom * times}}}", f"\\tfrac{{{top}}}{{{bottom}}}\\text{{ cm}}"]
    if value > 1 and bottom > 1:
        ways += [f"{top // bottom}\\frac{{{top % bottom}}}{{{bottom}}}", f"{top // bottom} {top % bottom}/{bottom}"]
    if bottom in (1, 2, 4, 5, 8):
        exact = f"{float(value)}"
        ways += [exact, f"{exact}0", f"{exact}\\text{{ cm}}", exact.replace("-", "−"), f"${exact}$"]
    return value, ways


def radical(rng: random.Random) -> tuple[object, list[str]]:
    a, b, c, k = rng.randrange(-9, 9), rng.randrange(2, 9), rng.choice([2, 3, 5, 7]), rng.randrange(2, 5)
    ways = [f"{a}+{b}\\sqrt{{{c}}}", f"{b}\\sqrt{{{c}}}+({a})", f"{a}+\\sqrt{{{b * b * c}}}", f"{b}√{c}+{{{a}}}"]
    ways += [f"\\frac{{{a * k}+{b * k}\\sqrt{c}}}{{{k}}}", f"t={a}+{b}\\sqrt {c}"]
    return (a, b, c), ways


def polynomial(rng: random.Random) -> tuple[object, list[str]]:
    a, b, c = rng.randrange(1, 9), rng.randrange(-9, 9), rng.randrange(-9, 9)
    product = f"({a}x+({b}))(x+({c}))"
    expanded = f"{a}x^2+({a * c + b})x+({b * c})"
    ways = [
        product,
        expanded,
        f"f(x) = {product}",
        f"y={expanded}",
        f"({a}x+({b}))\\cdot(x+({c}))",
        product.replace("x", " x "),
    ]
    return (a, a * c + b, b * c), ways


def points(rng: random.Random) -> tuple[object, list[str]]:
    values = rng.sample(range(-20, 20), rng.randrange(2, 5))
    mixed = rng.sample(values, len(values))
    joined = ", ".join(map(str, mixed))
    ways = [f"\\{{{joined}\\}}", f"\\left\\{{{joined}\\right\\}}", joined, " \\text{ and } ".join(map(str, mixed))]
    ways += [f"x \\in \\{{{joined}\\}}", " \\text{ or } ".join(f"x={value}" for value in mixed)]
    return frozenset(values), ways


def pair(rng: random.Random) -> tuple[object, list[str]]:
    values = rng.sample(range(-20, 20), 3)
    inside = ", ".join(map(str, values))
    return ("tuple", *values), [
        f"({inside})",
        f"\\left({inside}\\right)",
        f"(x,y,z)=({inside})",
        f"(A,B,C)=({inside})",
        f"({inside.replace('-', '−')})",
    ]


def stretch(rng: random.Random) -> tuple[object, list[str]]:
    low, high = sorted(rng.sample(range(-20, 20), 2))
    has_low, has_high = rng.random() < 0.5, rng.random() < 0.5
    plain = f"{'[' if has_low else '('}{low},{high}{']' if has_high else ')'}"
    left, right = "\\le" if has_low else "<", "\\leq" if has_high else "<"
    turned = {"\\le": "\\ge", "\\leq": "\\geq", "<": ">"}
    ways = [
        plain,
        f"x \\in {plain}",
        f"{low} {left} x {right} {high}",
        f"{high} {turned[right]} x {turned[left]} {low}",
    ]
    ways += [f"x {turned[left]} {low} \\text{{ and }} x {right} {high}", plain.replace(",", " , ")]
    middle = low + (high - low) / 2
    ways += [f"{plain[0]}{low},{middle}]\\cup[{middle},{high}{plain[-1]}"]
    return ("interval", low, high, has_low, has_high), ways


def outside(rng: random.Random) -> tuple[object, list[str]]:
    low, high = sorted(rng.sample(range(-20, 20), 2))
    ways = [f"(-\\infty,{low})\\cup({high},\\infty)", f"({high},\\infty)\\cup(-\\infty,{low})"]
    ways += [f"x<{low} \\text{{ or }} x>{high}", f"\\mathbb{{R}}\\setminus[{low},{high}]"]
    return ("outside", low, high), ways


def angle(rng: random.Random) -> tuple[object, list[str]]:
    top, bottom = rng.randrange(1, 12), rng.choice([2, 3, 4, 6, 12])
    degrees = Fraction(180 * top, bottom)
    ways = [f"{degrees}^\\circ", f"{degrees}°", f"{degrees}\\text{{ degrees}}", f"\\theta = {degrees}^{{\\circ}}"]
    return ("angle", degrees), [rng.choice(ways), f"\\frac{{{top}\\pi}}{{{bottom}}}\\text{{ radians}}"]


def huge(rng: random.Random) -> tuple[object, list[str]]:
    """Beyond what a float holds."""
    half, plus = rng.randrange(1000, 1400), rng.randrange(-2, 3)
    powers = [
        f"2^{{{2 * half}}}",
        f"4^{{{half}}}",
        f"2 \\cdot 2^{{{2 * half - 1}}}",
        f"\\frac{{2^{{{2 * half + 3}}}}}{{8}}",
    ]
    return ("huge", half, plus), [f"{power}+({plus})" for power in powers]


def choice(rng: random.Random) -> tuple[object, list[str]]:
    letter, value = rng.choice("ABCDE"), rng.randrange(2, 40)
    ways = [f"\\textbf{{({letter})}}\\ {value}", f"\\text{{({letter})}} {value}.0", f"\\text{{{letter}.}} x={value}"]
    return ("choice", letter, value), ways


def distance(rng: random.Random) -> tuple[object, list[str]]:
    a, k = rng.randrange(1, 9), rng.randrange(2, 5)
    ways = [
        f"|x-{a}|",
        f"|{a}-x|",
        f"\\sqrt{{(x-{a})^2}}",
        f"\\frac{{|{k}x-{k * a}|}}{{{k}}}",
        f"\\left|-x+{a}\\right|",
    ]
    return ("distance", a), ways


def monomial(rng: random.Random) -> tuple[object, list[str]]:
    a, n, letter = rng.randrange(2, 30), rng.randrange(2, 9), rng.choice("xyRkz")
    ways = [f"{a}{letter}^{n}", f"{a} {letter}^{{{n}}}", f"{a}\\,{letter}^{{{n}}}", f"{a} \\cdot {letter}^{{ {n} }}"]
    return ("monomial", a, n, letter), [*ways, f"{letter}^{n} \\cdot {a}"]


def counted(rng: random.Random) -> tuple[object, list[str]]:
    value = rng.randrange(1001, 9999)
    ways = [f"\\text{{{value} students}}", f"{value}\\text{{ students}}", f"{value:,}".replace(",", ",\\! ")]
    return Fraction(value), [*ways, f"\\text{{{value:,} students}}", f"[ABC] = {value}", f"{value}"]


def emphasised(rng: random.Random) -> tuple[object, list[str]]:
    value = rng.randrange(10, 99)
    marks = ["\\mathbf{%d}", "\\underline{%d}", "\\textbf{%d}", "\\boldsymbol{ %d }", "%d", "\\boxed{%d}"]
    return Fraction(value), [mark % value for mark in marks]


KINDS: list[Make] = [
    rational, radical, polynomial, points, pair, stretch, outside, huge, distance, monomial, counted,
    emphasised, angle, choice,
]  # fmt: skip
MEETING = (angle, choice)
"""Kinds that a plain number may also stand for: 30° is 30, (C) 12 is 12."""


@pytest.mark.parametrize("make", KINDS)
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_equal_values_stay_equal_in_any_notation(make: Make, seed: int) -> None:
    rng = random.Random(seed)
    _, ways = make(rng)
    first, second = rng.choice(ways), rng.choice(ways)
    assert quick_verdict(first, second) is True, (first, second)


@pytest.mark.parametrize("make", KINDS)
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), other=st.sampled_from(KINDS))
def test_different_values_never_become_equal(make: Make, seed: int, other: Make) -> None:
    rng = random.Random(seed)
    other = make if {make, other} & set(MEETING) else rng.choice([make, other])
    (thing, ways), (another, others) = make(rng), other(rng)
    if thing != another:
        first, second = rng.choice(ways), rng.choice(others)
        assert quick_verdict(first, second) is not True, (first, second)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from("ABCDE"), st.sampled_from("ABCDE"), st.integers(2, 40), st.integers(2, 40))
def test_a_letter_and_a_value_are_not_two_guesses(letter: str, other: str, value: int, another: int) -> None:
    truth = f"\\textbf{{({letter})}}\\ {value}"
    both = (letter, value) == (other, another)
    assert quick_verdict(f"\\text{{({other})}}\\ {another}", truth) is both
    assert quick_verdict(f"({other})", truth) is (letter == other)
    assert quick_verdict(str(another), truth) is (value == another)


@pytest.mark.parametrize("answer", ["2^{9000}", "2^{9001}", "3000!", "\\infty", "10^{400}", "e^{2000}", "-2^{9000}"])
@pytest.mark.parametrize("truth", ["2^{9000}", "\\infty", "10^{400}"])
def test_a_number_beyond_a_float_gets_its_verdict(answer: str, truth: str) -> None:
    assert MathVerifier().score(f"\\boxed{{{answer}}}", truth, {}).value == (answer == truth)


@pytest.mark.parametrize(
    ("answer", "truth", "equal"),
    [
        ("12\\text{n}", "12", False), ("12\\text{ N}", "12", True), ("€5", "\\$5", False),
        ("5\\text{ pounds}", "£5", True),
        ("60\\text{ mph}", "60\\text{ miles per hour}", True), ("30\\text{ radians}", "30^\\circ", False),
        ("6:15 \\text{ PM}", "6:15\\text{ p.m.}", True), ("6:15 \\text{ AM}", "6:15\\text{ p.m.}", False),
        ("June 20", "\\text{June 20}", True), ("June 2", "\\text{June 20}", False),
        ("\\text{Infinity}", "\\infty", True),
        ("|AB| = 5", "5", True), ("\\overline{AB}=5", "5", True), ("2x", "f^{-1}(x)=2x", True), ("|x|", "x", False),
        ("x", "|x|", False), ("\\text{sin}", "\\text{pi}", False), ("2^\\mathbf{12}", "2^1 2", False),
    ],
)  # fmt: skip
def test_changed_units_currencies_and_names_are_not_equal(answer: str, truth: str, equal: bool) -> None:
    assert MathVerifier().score(f"\\boxed{{{answer}}}", truth, {}).value == equal


SPOILED = [
    "> {n}", "\\ge {n}", "x \\le {n}", "\\neq {n}", "{m}x = {n}", "x+y={n}", "x = {m} = {n}", "x^2 = {n}",
    "{n} \\ne x", "\\max({n},{m})", "\\lfloor {n}.3 \\rfloor", "\\gcd({n},{n})", "|{n}|", "f({n})", "{n}x", "{n}_7",
    "{n}'", "{n}\\ldots", "{n}\\text{{ million}}", "{n}\\text{{ is not the answer}}", "{n} or {m}",
    "\\text{{not }}{n}", "{n}, {m}", "({n},{m})", "\\{{{n},{m}\\}}", "{n}({m})", "{n} \\cdot 1", "{n}+0", "{n}-0",
    "1({n})", "{n}\\text{{ k}}", "{n} {m}", "--{n}", "{n} \\pmod{{{m}}}", "\\pm {n}", "{n} \\to {m}", "{n}:{m}",
    "\\text{{at least }} {n}", "{n}\\text{{ or more}}", "{n}\\%{m}", "\\int_0^{{{n}}} 1\\,dx", "{n} \\in A",
    "{n}\\text{{ minus }}{m}", "\\begin{{vmatrix}}{n}\\end{{vmatrix}}", "10\\text{{ of }}{n}",
]  # fmt: skip


@pytest.mark.parametrize("form", SPOILED)
def test_a_statement_about_a_number_is_not_the_number(form: str) -> None:
    for n, m in ((20, 3), (7, 12), (144, 5)):
        answer = form.format(n=n, m=m)
        assert MathVerifier().score(f"\\boxed{{{answer}}}", str(n), {}).value == 0, answer
