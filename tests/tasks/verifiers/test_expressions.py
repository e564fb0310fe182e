"""Expressions compared by their values at sample points; expressions that cannot be read are left to other checks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upshot.tasks.verifiers.math.expressions import same_value


@pytest.mark.parametrize(
    ("left", "right", "verdict"),
    [
        ("(x+1)^2", "x^2+2x+1", True), ("3\\sqrt{2}", "\\sqrt{18}", True), ("x^{12}", "x^{11}x", True),
        ("e^{i\\pi}", "-1", True), ("\\frac{x}{y}-z", "x/y-z", True), ("2ab", "2ba", True), ("\\sqrt[3]{8}", "2", True),
        ("\\log_2(8)", "3", True), ("(2+3i)(1-i)", "5+i", True), ("\\frac{1}{\\sqrt{2}}", "\\frac{\\sqrt{2}}{2}", True),
        ("a+c", "2b", False), ("2a", "2B", False), ("36\\pi", "113.097", False), ("36\\pi", "113.2", False),
        ("x^2", "x^3", False),
        ("\\sqrt{x^2}", "x", None), ("1/2x", "x/2", None), ("\\log2", "\\ln2", None), ("1\\frac{1}{2}", "1.5", True),
        ("0.5x", "x/2", True), ("x", "x_1", None), ("f(x)", "x", None), ("5!", "120", True), ("\\int x", "x", None),
        ("word", "other", None), ("1/0", "1", None), ("9^{9999}", "1", None), ("((((((", "1", False), ("", "1", False),
    ],
)  # fmt: skip
def test_verdicts(left: str, right: str, verdict: bool | None) -> None:
    assert same_value(left, right) is verdict


@given(st.integers(-50, 50), st.integers(-50, 50), st.integers(-3, 3))
def test_a_product_equals_its_expansion_and_nothing_near_it(a: int, b: int, off: int) -> None:
    product = f"(x+({a}))(x+({b}))"
    expanded = f"x^2+({a + b})x+({a * b + off})"
    assert same_value(product, expanded) is (off == 0)


@given(st.text(alphabet="\\{}()[]^_+-/*0123456789abxyfracsqtpilog ", max_size=120))
def test_any_text_is_handled(text: str) -> None:
    assert same_value(text, "x+1") in (True, False, None)
