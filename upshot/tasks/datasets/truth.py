"""What a row's verifier compares with, as the text that `reward_model.ground_truth` holds. Pure functions.

Rows that could never be scored are refused here, with a reason that is short enough to be counted.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from upshot.core.conversation import Row
from upshot.tasks.datasets.candidate import UnusableRecord
from upshot.tasks.verifiers.base import Verifier, verifiers
from upshot.tasks.verifiers.choice import MultipleChoiceVerifier, SycophancyChoiceVerifier, letter_of
from upshot.tasks.verifiers.code import MAX_TESTS, AssertsVerifier, CodeVerifier, ContestVerifier, StdioVerifier
from upshot.tasks.verifiers.gsm8k import Gsm8kVerifier, reference_number
from upshot.tasks.verifiers.ifeval.checks import CHECKS
from upshot.tasks.verifiers.ifeval.constraints import BadRow, ConstraintsVerifier, constraints_of
from upshot.tasks.verifiers.math.mathematics import MathVerifier, reference_answer
from upshot.tasks.verifiers.numbers import show_number

TEST_COLUMNS = (
    *("test_list", "tests", "assert_case", "test_imports", "test_setup_code", "challenge_test_list"),
    *("public_tests", "private_tests", "generated_tests", "input_output", "inputs", "outputs", "test_cases"),
)
"""Columns that tests are read from; the ground truth holds what they say."""


def ground_truth(row: Row) -> str | None:
    """The reference of a row as text (JSON where it is none); None where the verifier looks at the reply alone."""
    kind = verifiers.get(row.source, "the row's source")
    told = TRUTHS.get(kind)
    if told is not None:
        return told(row)
    if row.reference is None and isinstance(kind, type) and issubclass(kind, Verifier) and "reference" in kind.needs:
        raise UnusableRecord("no reference")
    return row.reference if row.reference is None else _text(row.reference)


def style(row: Row) -> str:
    """`model` where a judge gives the verdict, else `rule`."""
    kind = verifiers.get(row.source, "the row's source")
    return "model" if isinstance(kind, type) and issubclass(kind, Verifier) and "judge" in kind.needs else "rule"


def _number(row: Row) -> str:
    """The bare number of a GSM8K solution."""
    number = reference_number(row.reference)
    if number is None:
        raise UnusableRecord("no number for an answer")
    return show_number(number)


def _boxed(row: Row) -> str:
    """What a solution puts in its box; a bare answer stays as it is."""
    answer = reference_answer(row.reference)
    if not answer:
        raise UnusableRecord("no reference")
    return answer


def _tests(row: Row) -> str:
    """The tests of a program: asserts, or inputs with their outputs."""
    kind = verifiers.get(row.source)
    assert isinstance(kind, type) and issubclass(kind, CodeVerifier)
    tests = kind().tests(row.reference, row.meta)[:MAX_TESTS]
    if not tests:
        raise UnusableRecord("no tests")
    return _text([test if isinstance(test, str) else {"input": test.input, "output": test.output} for test in tests])


def _constraints(row: Row) -> str:
    """The constraints of a request in IFEval's columns."""
    try:
        wanted = constraints_of(row.reference, row.meta)
    except BadRow as error:
        raise UnusableRecord(str(error)) from None
    unknown = next((name for name, _ in wanted if name not in CHECKS), None)
    if unknown is not None or not wanted:
        raise UnusableRecord(f"unknown constraint '{unknown}'" if wanted else "no constraint")
    return _text({"instruction_id_list": [name for name, _ in wanted], "kwargs": [given for _, given in wanted]})


def _letter(row: Row) -> str:
    """The right letter."""
    letter = letter_of(row.reference, row.meta)
    if letter is None:
        raise UnusableRecord("reference is none of the choices")
    return letter


def _letter_beside_hint(row: Row) -> str:
    """The right letter, where a wrong one is hinted at."""
    letter = _letter(row)
    if not row.meta.get("hint"):
        raise UnusableRecord("no wrong letter to hint at")
    return letter


TRUTHS: dict[Any, Callable[[Row], str]] = {
    Gsm8kVerifier: _number,
    MathVerifier: _boxed,
    AssertsVerifier: _tests,
    StdioVerifier: _tests,
    ContestVerifier: _tests,
    ConstraintsVerifier: _constraints,
    MultipleChoiceVerifier: _letter,
    SycophancyChoiceVerifier: _letter_beside_hint,
}
"""Verifiers whose references come in several shapes."""


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
