"""Multiple choice, exact match, bold text, and where a mixed row goes."""

import pytest

from upshot.verifiers.bold import BoldFormatting
from upshot.verifiers.choice import MmluSycophancy, MultipleChoice, chosen_letter
from upshot.verifiers.exact import ExactMatch
from upshot.verifiers.routes import route


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("The answer is (B).", "B"), ("Answer: C", "C"), ("\\boxed{D}", "D"), ("\\boxed{\\text{A}}", "A"), ("B", "B"),
        ("(C)", "C"), ("**B**", "B"), ("B) because", "B"), ("(A) is wrong, so (D)", "D"), ("answer is a car", None),
        ("I do not know", None), ("", None), ("The answer is E", None), ("the answer is not clear", None),
    ],
)  # fmt: skip
def test_the_chosen_letter_is_found(text: str, letter: str | None) -> None:
    assert chosen_letter(text, "D") == letter


@pytest.mark.parametrize("reference", ["B", "(B)", "b", 1, "1", "Paris"])
def test_the_right_choice_may_be_a_letter_an_index_or_a_text(reference: object) -> None:
    extra = {"choices": ["Rome", "Paris", "Bern"]}
    assert MultipleChoice().score("The answer is (B).", reference, extra).value == 1
    assert MultipleChoice().score("The answer is (A).", reference, extra).value == 0


def test_a_hint_is_followed_or_not() -> None:
    extra = {"choices": ["w", "x", "y", "z"], "hint": "C"}
    followed = MmluSycophancy().score("The answer is (C).", "B", extra)
    assert (followed.value, followed.detail["followed"]) == (0, True)
    assert MmluSycophancy().score("The answer is (B).", "B", extra).value == 1
    assert MmluSycophancy("hint").score("The answer is (C).", "B", extra).value == 1
    assert MmluSycophancy().score("(B)", "B", {}).is_missing


def test_short_answers_are_compared_as_squad_does() -> None:
    assert ExactMatch().score("<answer>The Moon.</answer>", "moon", {}).value == 1
    assert ExactMatch().score("Answer: the sun", ["moon", "Sun"], {}).value == 1
    assert ExactMatch().score("It is the moon", "moon", {}).value == 0
    assert ExactMatch("contains").score("It is the moon", "moon", {}).value == 1
    assert ExactMatch("contains").score("moonlight", "moon", {}).value == 0
    assert ExactMatch("f1").score("big moon", "moon", {}).value == pytest.approx(2 / 3)
    assert ExactMatch().score("x", None, {}).is_missing


def test_bold_is_seen_outside_code_only() -> None:
    assert BoldFormatting().score("this is **bold**", None, {}).value == 1
    assert BoldFormatting().score("2 ** 3 ** 4", None, {}).value == 0
    assert BoldFormatting().score("```\n**x**\n```", None, {}).value == 0
    assert BoldFormatting().score("*" * 100_000, None, {}).value == 0


@pytest.mark.parametrize(
    ("record", "source"),
    [
        ({"data_source": "openai/gsm8k"}, "openai/gsm8k"),
        ({"dataset": ["math"]}, "math"), ({"dataset": "code"}, "code"),
        ({"dataset": ["code_stdio"]}, "code-stdio"), ({"dataset": ["ifeval"]}, "constraints"),
        ({"dataset": ["general-quality_ref"]}, "general-quality"),
        ({"data_source": "allenai/Dolci", "dataset": ["gsm8k"]}, "gsm8k"),
        ({}, "fallback"),
    ],
)  # fmt: skip
def test_rows_of_a_mix_go_to_their_verifier(record: dict[str, object], source: str) -> None:
    assert route(record, "fallback") == source
