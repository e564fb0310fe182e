"""gsm8k: the number after ####, compared as a number; strict and flexible; forty tricky pairs."""

import asyncio

import pytest

from upshot.core.errors import UserError
from upshot.tasks.verifiers.base import verifiers
from upshot.tasks.verifiers.gsm8k import Gsm8kVerifier

STRICT: list[tuple[str, object, float]] = [
    ("#### 42", "42", 1),
    ("#### 41", "42", 0),
    ("so\n#### 42\n", "She has 2*21=<<2*21=42>>42.\n#### 42", 1),
    ("####42", "42", 1),
    ("#### 42.", "42", 1),
    ("#### 42.00", "42", 1),
    ("#### 10.00", "10", 1),
    ("#### 1,000", "1000", 1),
    ("#### 1000", "#### 1,000", 1),
    ("#### 1,0000", "10000", 0),
    ("#### $12", "12", 1),
    ("#### \\$12", "12", 1),
    ("#### 12 dollars", "12", 1),
    ("#### 50%", "50", 1),
    ("#### 0.5", "1/2", 1),
    ("#### 1/2", "0.5", 1),
    ("#### \\frac{1}{2}", "0.5", 1),
    ("#### 1 1/2", "1.5", 1),
    ("#### -5", "-5", 1),
    ("#### -5", "5", 0),
    ("#### 5", "-5", 0),
    ("#### −5", "-5", 1),
    ("#### **42**", "42", 1),
    ("#### \\boxed{42}", "42", 1),
    ("#### $42$", "42", 1),
    ("#### 42 or 43", "42", 0),
    ("#### 40 + 2", "42", 0),
    ("#### 40 + 2 = 42", "42", 0),
    ("#### answer", "42", 0),
    ("#### ", "42", 0),
    ("42", "42", 0),
    ("The answer is 42.", "42", 0),
    ("#### 41\nNo:\n#### 42", "42", 1),
    ("#### 42\nNo:\n#### 41", "42", 0),
    ("#### 42\nand 7 more words", "42", 1),
    ("#### 42", 42, 1),
    ("#### 42", 42.0, 1),
    ("#### 3.14", "3.141", 0),
    ("#### 1e3", "1000", 1),
    ("#### .5", "0.50", 1),
    ("#### 007", "7", 1),
    ("#### 42 apples", ["42"], 1),
    ("", "42", 0),
    ("#### 5 million", "5", 0),
    ("#### 5 million", "5000000", 1),
    ("#### $1.5 million dollars", "1,500,000", 1),
    ("#### 5k", "5", 0),
    ("#### 5k", "5000", 1),
    ("#### 5 km", "5", 1),
    ("#### not 5", "5", 0),
    ("#### at least 5", "5", 0),
    ("#### about 5", "5", 0),
    ("#### 5 or more", "5", 0),
    ("#### 5 and a half", "5", 0),
    ("#### 5 dozen", "5", 0),
    ("#### 5 more apples", "5", 1),
    ("#### 5 left over", "5", 1),
    ("#### The answer is 5", "5", 1),
]
FLEXIBLE: list[tuple[str, str, float]] = [
    ("The answer is 42.", "42", 1),
    ("so it is $1,000.", "1000", 1),
    ("First 3, then 42", "42", 1),
    ("42 of 50", "42", 0),
    ("it fell by -5", "-5", 1),
    ("10-5", "5", 1),
    ("#### 42\nI used 3 steps", "42", 1),
    ("#### none, but 42", "42", 1),
    ("no number at all", "42", 0),
    ("\\boxed{42}", "42", 1),
    ("half, that is 1/2", "0.5", 1),
    ("50%.", "50", 1),
    ("#### not 5", "5", 0),
    ("it is not 5", "5", 0),
    ("so 5 million", "5", 0),
    ("so 5 million", "5000000", 1),
]


@pytest.mark.parametrize(("response", "reference", "value"), STRICT)
def test_strict_verdicts(response: str, reference: object, value: float) -> None:
    assert Gsm8kVerifier().score(response, reference, {}).value == value


@pytest.mark.parametrize(("response", "reference", "value"), FLEXIBLE)
def test_flexible_verdicts(response: str, reference: str, value: float) -> None:
    assert Gsm8kVerifier("flexible").score(response, reference, {}).value == value


@pytest.mark.parametrize(
    "line",
    [
        "5M", "5B", "5x", "5 x", "5e", "5i", "5th", "5ish", "5²", "5½", "½5", "⑤", "!5", "!=5", "≠5", "≈5", "≥5", "~5",
        "5±1",
        "5?", "unknown (5?)", "5 ❌", "5 bn", "5 crore", "5 lakh", "5 grand", "5 tens", "5 tenths", "5 thousandths",
        "5 factorial", "5 plus two", "5 times two", "between 5 and ten", "six, not 5", "anything but 5", "twice 5",
        "5 to the power of two", "the square root of 5", "up to 5", "5 if x, else six", "5 perhaps", "5_8", "0x5",
        "\\boxed{5} or \\boxed{6}", "\\boxed{6} 5", "\\sqrt{25}", "~~6~~ 5", "5:30", "5 days, 3 hours",
    ],
)  # fmt: skip
def test_a_statement_about_five_is_not_five(line: str) -> None:
    assert Gsm8kVerifier().score(f"So.\n#### {line}", "5", {}).value == 0


@pytest.mark.parametrize(
    "line",
    [
        "5.", "5!", "5 months", "5 months.", "5km", "5 km/h", "5 ft^2", "5 m^2", "5pm",
        "5 pairs of shoes", "5 more apples",
        "5 fewer", "5 a day", "5 each", "5°", "5 ✅", "£5", "₹5", "USD 5", "[5]", "`5`", "\"5\"",
        "$\\boxed{5}$", "\\(5\\)",
        "５", "٥", "5 paths", "5 teenagers", "The answer is 5 dollars",
    ],
)  # fmt: skip
def test_units_and_formatting_do_not_change_a_number(line: str) -> None:
    assert Gsm8kVerifier().score(f"So.\n#### {line}", "5", {}).value == 1


def test_a_reference_that_is_not_a_number_is_missing_instead_of_wrong() -> None:
    assert Gsm8kVerifier().score("#### 42", "forty-two", {}).why == "gsm8k: reference is not a number"


def test_verifiers_are_found_by_exact_source_and_others_get_a_hint() -> None:
    assert verifiers.get("openai/gsm8k") is verifiers.get("gsm8k")
    with pytest.raises(UserError, match="did you mean 'gsm8k'"):
        verifiers.get("gsm8")
    with pytest.raises(UserError, match="unknown verifier"):
        verifiers.get("openai/gsm8k-but-other-things")


def test_the_async_call_gives_the_same_verdict() -> None:
    assert asyncio.run(Gsm8kVerifier().verify("#### 42", "42", {})).value == 1
