"""Numbers in text are compared exactly, as numbers, whatever their formatting."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upshot.tasks.verifiers.numbers import last_number, parse_number, show_number


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("-5", -5), ("− 5", -5), ("10.00", 10), ("1,000", 1000), ("1,234,567.5", Fraction(2469135, 2)), ("$12", 12),
        ("-$5", -5), ("$-5", -5), ("50%", 50), ("50\\%", 50), ("1/2", Fraction(1, 2)), ("1 1/2", Fraction(3, 2)),
        ("\\frac{3}{4}", Fraction(3, 4)), (".5", Fraction(1, 2)), ("12.", 12), ("**12**", 12), ("\\boxed{12}", 12),
        ("1e3", 1000), ("12 dollars", 12), ("€7", 7), ("+3", 3),
        ("$18/hour", 18), ("18 m²", 18),
    ],
)  # fmt: skip
def test_a_number_is_read_in_every_formatting(text: str, value: Fraction) -> None:
    assert parse_number(text) == value


@pytest.mark.parametrize(
    "text", ["", "none", "12 or 13", "3-1", "1=2", "9**9**9", "9" * 200, "1/0", "12,34", "x = 4", "18/x"]
)
def test_a_text_that_is_not_one_number_gives_none(text: str) -> None:
    assert parse_number(text) is None


def test_the_last_number_of_a_text_is_found() -> None:
    assert last_number("First 3, then 10-4, so it is -7.") == -7
    assert last_number("it costs $1,000.50.") == Fraction(2001, 2)
    assert last_number("10-5") == 5
    assert last_number("no number") is None


@given(st.fractions(max_denominator=10**6))
def test_shown_numbers_read_back_as_themselves(value: Fraction) -> None:
    assert parse_number(show_number(value)) == value


@given(st.integers(-(10**12), 10**12))
def test_thousands_commas_and_signs_do_not_change_an_integer(value: int) -> None:
    assert parse_number(f"{value:,}") == value
    assert parse_number(f"${value:,}.00") == value


@given(st.text(max_size=300))
def test_any_text_is_handled(text: str) -> None:
    parse_number(text)
    last_number(text)
