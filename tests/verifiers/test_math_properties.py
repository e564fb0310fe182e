"""math by kinds: what is equal stays equal however it is written, what is not never becomes so."""

from __future__ import annotations

import random
from collections.abc import Callable
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from upshot.verifiers.math_equal import quick_verdict
from upshot.verifiers.mathematics import Mathematics

Make = Callable[[random.Random], tuple[object, list[str]]]
"""Draws a thing: what it is, and several ways to write it."""


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


KINDS: list[Make] = [rational, radical, polynomial, points, pair, stretch, outside]


@pytest.mark.parametrize("make", KINDS)
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_what_is_equal_stays_equal_however_it_is_written(make: Make, seed: int) -> None:
    rng = random.Random(seed)
    _, ways = make(rng)
    first, second = rng.choice(ways), rng.choice(ways)
    assert quick_verdict(first, second) is True, (first, second)


@pytest.mark.parametrize("make", KINDS)
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), other=st.sampled_from(KINDS))
def test_what_is_not_equal_never_becomes_so(make: Make, seed: int, other: Make) -> None:
    rng = random.Random(seed)
    (thing, ways), (another, others) = make(rng), rng.choice([make, other])(rng)
    if thing != another:
        first, second = rng.choice(ways), rng.choice(others)
        assert quick_verdict(first, second) is not True, (first, second)


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
def test_what_is_said_about_a_number_is_not_the_number(form: str) -> None:
    for n, m in ((20, 3), (7, 12), (144, 5)):
        answer = form.format(n=n, m=m)
        assert Mathematics().score(f"\\boxed{{{answer}}}", str(n), {}).value == 0, answer
