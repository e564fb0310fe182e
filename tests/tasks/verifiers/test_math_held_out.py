"""math on pairs that were written without looking at the verifier, and math-verify on the same ones."""

import logging
from collections.abc import Callable

import pytest
from math_held_out import PAIRS as FIRST
from math_second_table import DISPUTED
from math_second_table import PAIRS as SECOND

from upshot.tasks.verifiers.math.mathematics import MathVerifier

Pairs = list[tuple[str, str, str, bool]]
tables = pytest.mark.parametrize("pairs", [FIRST, SECOND], ids=["first", "second"])


def ours(answer: str, truth: str) -> bool:
    return MathVerifier().score(f"so it is $\\boxed{{{answer}}}$.", truth, {}).value == 1


def theirs(answer: str, truth: str) -> bool:
    from math_verify import parse, verify

    given = parse(f"so it is $\\boxed{{{answer}}}$.", parsing_timeout=None)
    return bool(verify(parse(f"\\boxed{{{truth}}}", parsing_timeout=None), given, strict=True, timeout_seconds=None))


def right(pairs: Pairs, verdict: Callable[[str, str], bool]) -> int:
    return sum(verdict(answer, truth) == equal for _, answer, truth, equal in pairs)


@tables
def test_nineteen_of_twenty_verdicts_are_right(pairs: Pairs) -> None:
    assert right(pairs, ours) >= 0.95 * len(pairs)


def test_the_tables_are_large_enough_for_that_claim() -> None:
    assert len(FIRST) >= 150
    assert len(SECOND) + len(DISPUTED) == 150


@tables
def test_no_wrong_answer_is_accepted(pairs: Pairs) -> None:
    assert [(answer, truth) for _, answer, truth, equal in pairs if not equal and ours(answer, truth)] == []


@tables
@pytest.mark.slow  # math-verify takes a quarter of a minute for these
def test_math_verify_alone_is_right_less_often(pairs: Pairs) -> None:
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    assert right(pairs, theirs) < right(pairs, ours)
