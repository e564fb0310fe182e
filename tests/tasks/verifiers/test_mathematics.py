"""math: tricky pairs, each with its verdict; texts that are not answers; bounded time on hostile answers."""

import time
from importlib.metadata import version

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from math_pairs import PAIRS
from math_spellings import SPELLINGS
from nasty import NASTY

from tests.patience import patience
from upshot.tasks.verifiers.gsm8k import Gsm8kVerifier
from upshot.tasks.verifiers.math.algebra import equivalent
from upshot.tasks.verifiers.math.answer import boxed_answer, final_answer
from upshot.tasks.verifiers.math.equal import quick_verdict
from upshot.tasks.verifiers.math.mathematics import MathVerifier


def test_latex_is_read_with_any_antlr_runtime_that_the_parser_has_tables_for() -> None:
    assert version("antlr4-python3-runtime").startswith(("4.9.", "4.11.", "4.13."))
    assert equivalent("\\frac{x+1}{2}", "\\frac{1+x}{2}")
    assert not equivalent("\\frac{x+1}{2}", "\\frac{2+x}{2}")


def test_there_are_enough_pairs() -> None:
    assert len(PAIRS) >= 60


@pytest.mark.parametrize(("answer", "truth", "equal"), [*PAIRS, *SPELLINGS])
def test_tricky_pairs_get_their_verdict(answer: str, truth: str, equal: bool) -> None:
    response = f"We find that the result is $\\boxed{{{answer}}}$."
    assert MathVerifier().score(response, truth, {}).value == float(equal)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("The answer is $x=5$, since 3 + 2 = 5.", "$x=5$"),
        ("The answer is 5 because 3 + 2 is 5.", "5"),
        ("The answer is 4, which is not 5.", "4"),
        ("so \\boxed{\\frac{1}{2}} it is", "\\frac{1}{2}"),
        ("\\boxed{1} no, \\boxed{2}", "2"),
        ("\\boxed{1} and \\boxed{2}", "1, 2"),
        ("\\boxed{3}, \\boxed{4}", "3, 4"),
        ("$\\boxed{8}$, or $\\boxed{7}$", "8, 7"),
        ("\\boxed{8} \\text{ or } \\boxed{7}", "8, 7"),
        ("\\boxed{1} / \\boxed{2}; \\boxed{7}", "1, 2, 7"),
        ("\\boxed{1}. \\boxed{2}", "2"),
        ("**Answer:** 7", "7"),
        ("The answer is: **7**.", "7"),
        ("The answer is 2**3.", "2**3"),
        ("\\fbox{7}", "7"),
        ("\\boxed 5", "5"),
        ("The final answer is $x+1$. I hope it is correct.", "$x+1$"),
        ("the answer is 12.", "12"),
        ("we get $y=3$ and then $z=4$", "z=4"),
        ("it has 3 legs and 14 eyes", "14"),
        ("nothing here", None),
        ("\\boxed{unclosed", None),
    ],
)
def test_the_final_answer_is_found(text: str, answer: str | None) -> None:
    assert final_answer(text) == answer


def test_boxed_mode_accepts_only_a_box() -> None:
    assert MathVerifier("boxed").score("The answer is 2.", "2", {}).value == 0
    assert MathVerifier("flexible").score("The answer is 2.", "2", {}).value == 1


def test_a_whole_solution_is_a_reference_too() -> None:
    assert MathVerifier().score("\\boxed{7}", "Adding up, we get $\\boxed{7}$.", {}).value == 1


def test_most_verdicts_need_no_algebra() -> None:
    settled = [quick_verdict(answer, truth) for answer, truth, _ in PAIRS]
    assert sum(verdict is not None for verdict in settled) > len(PAIRS) / 2
    assert all(verdict in (None, equal) for verdict, (_, _, equal) in zip(settled, PAIRS, strict=True))


@pytest.mark.parametrize("number", range(len(NASTY)))
def test_hostile_answers_are_decided_or_passed_on_at_once(number: int) -> None:
    answer = NASTY[number]
    started = time.process_time()
    for response in (answer, f"#### {answer}", f"\\boxed{{{answer}}}", f"{answer} = 5"):
        MathVerifier().quick(response, "2", {})
        MathVerifier().quick(response, "x+1", {})
        for mode in ("strict", "flexible"):
            assert Gsm8kVerifier(mode).score(response, "271828", {}).value == 0
    assert time.process_time() - started < patience(3)


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="\\{}()[]^_+-=,.0123456789abxfracsqt $%", max_size=200))
def test_any_latex_looking_text_is_handled(text: str) -> None:
    boxed_answer(text)
    final_answer(text)
    quick_verdict(text, "2")
    assert quick_verdict(text, text) in (True, False)


@given(st.integers(-(10**9), 10**9))
def test_an_integer_equals_itself_in_every_form(value: int) -> None:
    for form in (f"{value:,}", f"{value}.0", f"${value}$", f"\\text{{{value}}}", f"x = {value}"):
        assert quick_verdict(form, str(value)) is True
    assert quick_verdict(str(value + 1), str(value)) is False
    assert quick_verdict(f" {value} . ", str(value)) is True
