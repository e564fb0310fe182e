"""Honest programs never get a 0: the judge confirms them or leaves them unconfirmed; the tests bound how many are
unconfirmed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.sandbox.honest import CLASS_TESTS, CORPUS, FUNCTION_TESTS, LINKED_TESTS, NUMERIC_TESTS
from upshot.sandbox import Limits, Outcome
from upshot.sandbox.outcome import TestResult

UNCONFIRMED = {FUNCTION_TESTS[0]: 22, CLASS_TESTS[0]: 35, LINKED_TESTS[0]: 8, NUMERIC_TESTS[0]: 4}
"""At most this many of each kind may be unconfirmed; keyed by the first test of the kind."""


async def _decide_all(sandbox: Any) -> list[TestResult]:
    gate, limits = asyncio.Semaphore(2), Limits(cpu_seconds=5, memory_mb=1024)

    async def decide(program: str, test: str) -> TestResult:
        async with gate:
            return (await sandbox.test_program(program, [test], limits))[0]

    return await asyncio.gather(*(decide(program, test) for program, test in CORPUS))


def test_no_honest_program_gets_a_zero_and_few_are_unconfirmed(box: Any) -> None:
    pytest.importorskip("numpy")
    results = box(_decide_all(box.sandbox))
    assert len(results) >= 150
    failed = [(test, result) for (_, test), result in zip(CORPUS, results, strict=True) if result.value == 0]
    assert not failed
    assert {result.outcome for result in results} == {Outcome.PASSED, Outcome.UNCONFIRMED}
    counts: dict[str, int] = {}
    kind = ""
    for (_, test), result in zip(CORPUS, results, strict=True):
        kind = test if test in UNCONFIRMED else kind
        counts[kind] = counts.get(kind, 0) + (result.outcome is Outcome.UNCONFIRMED)
    assert all(counts[kind] <= UNCONFIRMED[kind] for kind in UNCONFIRMED), counts
