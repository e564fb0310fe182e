"""The results of a program's assert tests, by two looks.

The plain look runs program and tests in one process, as is usual. A test that fails there has failed. Programs that
pass get a second look by a judge, which holds the tests outside the program's process and sees only data from it: it
confirms a pass, or does not.

If tests consist only of bare calls and literals (`asserts/values.py`), and the calls return only plain data, that data
alone decides: one look is enough, and it costs a fifth of the other two.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence

from upshot.sandbox.asserts import verdict
from upshot.sandbox.asserts.values import split
from upshot.sandbox.asserts.verdict import Remains
from upshot.sandbox.limits import Limits
from upshot.sandbox.local.run import RunRequest
from upshot.sandbox.outcome import Outcome, TestResult

ENDED = (Outcome.PASSED, Outcome.WRONG, Outcome.ERROR)


async def decide(
    execute: Callable[[RunRequest], Awaitable[Remains]], program: str, tests: Sequence[str], given: str, limits: Limits
) -> list[TestResult]:
    """One result per test; `execute` runs a request."""
    tested = {"program": program, "seed": random.getrandbits(32)}
    checks = [check for check in map(split, tests) if check is not None]
    if len(checks) == len(tests):
        calls = [(test[0].imports, [check.call for check in test]) for test in checks]
        values = verdict.of_calls(checks, await execute(RunRequest("calls", {**tested, "calls": calls}, limits)))
        if None not in values:
            return [result for result in values if result is not None]
    remains = await execute(RunRequest("tests", {**tested, "tests": [*tests]}, limits))
    plain = verdict.of_plain(len(tests), remains)
    if not any(result.passed for result in plain):
        return plain
    if limits.judge_seconds == 0:
        return verdict.of_judged(plain, Remains(lines=[{"u": "no judge was asked"}] * len(plain)))
    # The judge repeats every test that has ended: a failed one may have made something that others use.
    left_out = [index for index, result in enumerate(plain) if result.outcome not in ENDED]
    judge = {"tests": [*tests], "given": given, "skip": left_out}
    return verdict.of_judged(plain, await execute(RunRequest("serve", tested, limits.judged, judge=judge)))
