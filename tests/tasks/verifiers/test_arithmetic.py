"""Steps `a op b = c` are found and evaluated; a step that cannot be read completely is never called wrong."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upshot.tasks.verifiers.arithmetic import broken_steps, evaluate, steps


@pytest.mark.parametrize(
    "text",
    [
        "She sold 48/2 = 24 clips.", "48+24 = <<48+24=72>>72 clips", "10 / 3 = 3.33", "20% * 50 = 10", "5/20 = 25%",
        "$1,000 + $500 = $1,500", "(3 + 4) x 2 = 14", "3 × 4 = 12", "2/3 = 40", "3x-5=16", "x + 3 = 7", "6 / 1/4 = 24",
        "12 - 3 = 9 . 9 + 1 = 10 .", "2^3 = 8", "in 2020 = x", "3.5 + 1.5 = 5",
        "0.1 + 0.2 = 0.30000000000000004", "3 * 1.1 = 3.3000000000000003", "0.1 * 3 * 10 = 3.0000000000000004",
    ],
)  # fmt: skip
def test_right_or_unreadable_steps_are_not_broken(text: str) -> None:
    assert broken_steps(text) == []


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("so 3 + 4 = 8.", "3 + 4 = 8"), ("$10 - $4 = $5", "$10 - $4 = $5"), ("2 x 6 = 13", "2 x 6 = 13"),
        ("0.1 + 0.2 = 0.31", "0.1 + 0.2 = 0.31"), ("0.1 + 0.2 = 0.300001", "0.1 + 0.2 = 0.300001"),
        ("10/4 = 4", "10/4 = 4"), ("7 + 5 = 13 . #### 13", "7 + 5 = 13"), ("First 1+1=2, then 2+2=5.", "2+2=5"),
    ],
)  # fmt: skip
def test_a_step_that_does_not_hold_is_named(text: str, shown: str) -> None:
    found = broken_steps(text)
    assert [" ".join(step.text.split()).replace(" = ", "=") for step in found] == [shown.replace(" = ", "=")]


numbers = st.integers(0, 10**6)


@given(numbers, st.sampled_from("+-*"), numbers, st.integers(-3, 3))
def test_a_step_is_broken_exactly_when_the_result_is_off(a: int, op: str, b: int, off: int) -> None:
    value = {"+": a + b, "-": a - b, "*": a * b}[op] + off
    found = steps(f"So {a} {op} {b} = {value}")
    assert [step.holds for step in found] == [off == 0]


@given(st.integers(1, 999), st.integers(1, 999))
def test_rounded_quotients_are_accepted(a: int, b: int) -> None:
    assert broken_steps(f"we get {a} / {b} = {a / b:.2f}") == []


def test_evaluation_is_exact_and_bounded() -> None:
    assert evaluate("0.1 + 0.2") == Fraction(3, 10)
    assert evaluate("1/0") is None
    assert evaluate("9**9**9") is None
    assert evaluate("(" * 1000 + "1" + ")" * 1000) is None
    assert evaluate("1+" * 1000 + "1") is None


@given(st.text(alphabet="0123456789+-*/=().,x%$ \n", max_size=400))
def test_any_arithmetic_looking_text_is_handled(text: str) -> None:
    steps(text)
