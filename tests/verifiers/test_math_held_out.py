"""math on pairs that were written before the verifier was worked on, beside math-verify on the same ones."""

import logging
from collections.abc import Callable

import pytest
from math_held_out import PAIRS

from upshot.verifiers.mathematics import Mathematics


def ours(answer: str, truth: str) -> bool:
    return Mathematics().score(f"so it is $\\boxed{{{answer}}}$.", truth, {}).value == 1


def theirs(answer: str, truth: str) -> bool:
    from math_verify import parse, verify

    given = parse(f"so it is $\\boxed{{{answer}}}$.", parsing_timeout=None)
    return bool(verify(parse(f"\\boxed{{{truth}}}", parsing_timeout=None), given, strict=True, timeout_seconds=None))


def right(verdict: Callable[[str, str], bool]) -> int:
    return sum(verdict(answer, truth) == equal for _, answer, truth, equal in PAIRS)


def test_nineteen_of_twenty_verdicts_are_right() -> None:
    assert len(PAIRS) >= 150
    assert right(ours) >= 0.95 * len(PAIRS)


def test_no_wrong_answer_is_taken() -> None:
    assert [(answer, truth) for _, answer, truth, equal in PAIRS if not equal and ours(answer, truth)] == []


@pytest.mark.slow  # math-verify takes a quarter of a minute for these
def test_math_verify_alone_is_right_less_often() -> None:
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    assert right(theirs) < right(ours)
