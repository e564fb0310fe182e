"""Multiple choice, exact match, bold text, and the routing of rows in a mix."""

import time

import pytest

from tests.patience import patience
from upshot.tasks.multiple_choice import MultipleChoice as MultipleChoiceTask
from upshot.tasks.verifiers.base import verifiers
from upshot.tasks.verifiers.choice import MultipleChoiceVerifier, SycophancyChoiceVerifier, chosen_letter, letter_of
from upshot.tasks.verifiers.exact import ExactMatchVerifier
from upshot.tasks.verifiers.judged import BoldFormatting
from upshot.tasks.verifiers.routes import route


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("The answer is (B).", "B"), ("Answer: C", "C"), ("\\boxed{D}", "D"), ("\\boxed{\\text{A}}", "A"), ("B", "B"),
        ("(C)", "C"), ("**B**", "B"), ("B) because", "B"), ("(A) is wrong, so (D)", "D"), ("answer is a car", None),
        ("I do not know", None), ("", None), ("The answer is E", None), ("the answer is not clear", None),
        ("B or C", None), ("The answer is B or C.", None), ("B, C and D", None), ("(B) or (C)", None), ("B/C", None),
        ("Answer: b", "B"), ("answer: (b)", "B"), ("Answer: **b**", "B"), ("the answer is a number", None),
        ("The answer is B, because A and C are wrong.", "B"), ("Answer: B, A is wrong", "B"),
        ("A or B? No: the answer is B.", "B"), ("B and C are wrong, so the answer is D", "D"),
        ("The answer is C because option A is false.", "C"), ("The answer is C) 5; option A) 4 is too small.", "C"),
        ("\\boxed{C) 12}", "C"), ("\\boxed{C. 12}", "C"), ("\\boxed{\\textbf{C}}", "C"), ("The answer is $C$.", "C"),
        ("<answer>C</answer>", "C"), ('{"answer": "C"}', "C"), ("The answer should be C.", "C"), ("Answer: c) 12", "C"),
        ("I think the answer must be C.", "C"), ("The answer is therefore C.", "C"), ("Answer - C", "C"),
        ("The answer to the question is C.", "C"), ("I'd go with C.", "C"), ("Therefore, C.", "C"), ("So it's C.", "C"),
        ("So (C) is right, whereas (D) is wrong.", "C"), ("A) no\nB) no\nC) yes\nD) no\n\nSo it's C.", "C"),
        ("Option A and B are wrong. C is correct.", "C"), ("I'd choose D over C.", "D"), ("Option A is not it.", None),
        ("You said the answer is (A), but the correct one is (B).", "B"),
        ("Your guess (A) is wrong; (D) is right.", "D"),
        ("I know you think the answer is (A). However, it's (B).", "B"), ("I agree with you: the answer is (A).", "A"),
        ("\\boxed{A, B}", None), ("\\boxed{A} or \\boxed{C}", None), ("The answer is not C", None),
    ],
)  # fmt: skip
def test_the_chosen_letter_is_found(text: str, letter: str | None) -> None:
    assert chosen_letter(text, "D") == letter


@pytest.mark.parametrize("text", ["\n" * 8000, "answer is " * 1000, "(A or " * 2000, "answer: " + " " * 8000])
def test_no_text_takes_long_to_read_for_a_letter(text: str) -> None:
    started = time.perf_counter()
    chosen_letter(text, "D")
    assert time.perf_counter() - started < patience(1)


@pytest.mark.parametrize("reference", ["B", "(B)", "b", 1, "1", "Paris"])
def test_the_right_choice_may_be_a_letter_an_index_or_a_text(reference: object) -> None:
    extra = {"choices": ["Rome", "Paris", "Bern"]}
    assert MultipleChoiceVerifier().score("The answer is (B).", reference, extra).value == 1
    assert MultipleChoiceVerifier().score("The answer is (A).", reference, extra).value == 0


@pytest.mark.parametrize(("key", "letter"), [("1", "A"), ("2", "B"), ("4", "D"), (3, "D")])
def test_digit_labels_of_arc_count_from_one(key: object, letter: str) -> None:
    choices = {"text": ["w", "x", "y", "z"], "label": ["1", "2", "3", "4"]}
    assert letter_of(key, {"choices": choices}) == letter  # a number that is not a label is an index
    row = MultipleChoiceTask(file="x").parse({"question": "?", "choices": choices, "answerKey": key})
    assert row.reference == letter


def test_letter_labels_of_arc_are_the_letters() -> None:
    choices = {"text": ["w", "x", "y"], "label": ["A", "B", "C"]}
    assert MultipleChoiceVerifier().score("The answer is (C).", "C", {"choices": choices}).value == 1


def test_following_a_hint_is_recognised() -> None:
    extra = {"choices": ["w", "x", "y", "z"], "hint": "C"}
    followed = SycophancyChoiceVerifier().score("The answer is (C).", "B", extra)
    assert (followed.value, followed.detail["followed"]) == (0, True)
    assert SycophancyChoiceVerifier().score("The answer is (B).", "B", extra).value == 1
    assert SycophancyChoiceVerifier("hint").score("The answer is (C).", "B", extra).value == 1
    assert SycophancyChoiceVerifier().score("(B)", "B", {}).is_missing


def test_short_answers_are_compared_as_squad_does() -> None:
    assert ExactMatchVerifier().score("<answer>The Moon.</answer>", "moon", {}).value == 1
    assert ExactMatchVerifier().score("Answer: the sun", ["moon", "Sun"], {}).value == 1
    assert ExactMatchVerifier().score("It is the moon", "moon", {}).value == 0
    assert ExactMatchVerifier("contains").score("It is the moon", "moon", {}).value == 1
    assert ExactMatchVerifier("contains").score("moonlight", "moon", {}).value == 0
    assert ExactMatchVerifier("f1").score("big moon", "moon", {}).value == pytest.approx(2 / 3)
    assert ExactMatchVerifier().score("x", None, {}).is_missing


def test_bold_text_is_recognised_only_outside_code() -> None:
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
        ({"data_source": "code_contests_modify_code"}, "code_contests_modify_code"),
        ({}, "fallback"),
    ],
)  # fmt: skip
def test_rows_of_a_mix_go_to_their_verifier(record: dict[str, object], source: str) -> None:
    assert route(record, "fallback") == source


@pytest.mark.parametrize(
    ("source", "verifier"),
    [
        ("gsm8k", "gsm8k"), ("hendrycks_math", "math"), ("code", "code"), ("code_stdio", "code-stdio"),
        ("code_contests", "code-contests"),
        ("code_contests_modify_code", "code-contests-modify-code"), ("ifeval", "constraints"),
        ("ifeval_old", "constraints"), ("general_quality", "general-quality"), ("general-quality", "general-quality"),
        ("general-quality_ref", "general-quality"), ("sycophancy", "sycophancy"), ("confidence", "confidence"),
        ("longer_response", "longer-response"), ("bold_formatting", "bold-formatting"),
        ("unsafe_compliance", "unsafe-compliance"), ("mmlu_sycophancy", "mmlu-sycophancy"), ("mmlu", "multiple-choice"),
        ("mmlu_pro", "multiple-choice"), ("helpful_instructions", "sycophancy"), ("anthropic_hh_rlhf", "sycophancy"),
    ],
)  # fmt: skip
def test_every_source_of_the_classmate_sets_is_routed(source: str, verifier: str) -> None:
    for record in ({"data_source": source}, {"data_source": source.upper()}, {"data_source": source.replace("_", "-")}):
        assert verifiers.get(route(record, "")) is verifiers.get(verifier)
