"""The results of a program's assert tests, by two looks.

The plain look runs program and tests in one process, as everybody does. What fails there is a failure. Programs that
pass are looked at a second time, by a judge who holds the tests outside of the program's process and sees nothing of it
but data: it confirms a pass, or does not. Where a program changes its arguments in place and the judge does not confirm
it with the original ones, the judge looks once more and takes over the changes; such a pass is marked `in_place`.

Where tests are nothing but bare calls and literals (`asserts/split.py`), and all that the calls return is plain data,
that data alone decides: one look is enough, and it is the cheapest of the three.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from upshot.sandbox.asserts import verdict
from upshot.sandbox.asserts.split import Check, split
from upshot.sandbox.asserts.verdict import Remains
from upshot.sandbox.limits import Limits
from upshot.sandbox.local.run import RunRequest
from upshot.sandbox.outcome import Outcome, TestResult

Execute = Callable[[RunRequest], Awaitable[Remains]]
Found = list[TestResult | None]


class TestedProgram:
    """One program, its tests, and a place to run them."""

    __test__ = False

    def __init__(self, execute: Execute, program: str, tests: Sequence[str], given: str, limits: Limits) -> None:
        self.execute = execute
        self.program, self.tests, self.given, self.limits = program, list(tests), given, limits
        self.seed = random.getrandbits(32)

    async def decide(self) -> list[TestResult]:
        """One result per test."""
        checks = [check for check in map(split, self.tests) if check is not None]
        if len(checks) == len(self.tests):
            found = await self._look_past_timeouts(lambda skip: self._look_at_values(checks, skip))
            if None not in found:
                return [result for result in found if result is not None]
        plain = [result for result in await self._look_past_timeouts(self._look_plainly) if result is not None]
        if not any(result.passed for result in plain):
            return plain
        remains = await self._look_as_judge(plain, restores=False)
        judged = verdict.of_judged(plain, remains)
        doubted = [index for index, result in enumerate(judged) if result.outcome is Outcome.UNCONFIRMED]
        if not any("c" in line for index, line in enumerate(remains.lines) if index in doubted):
            return judged
        again = verdict.of_judged(plain, await self._look_as_judge(plain, restores=True))
        in_place = {index: again[index] for index in doubted if again[index].passed}
        return [replace(in_place[i], in_place=True) if i in in_place else one for i, one in enumerate(judged)]

    async def _look_past_timeouts(self, look: Callable[[list[int]], Awaitable[Found]]) -> Found:
        """What a look finds; where a timeout does not end the tests, looked again without the one that had it.

        The others are run again, too: later tests may need what they define.
        """
        done: dict[int, TestResult | None] = {}
        skip: list[int] = []
        while True:
            found = await look(skip)
            rest = [index for index in range(len(self.tests)) if index not in done]
            late = next((index for index in rest if _is_timeout(found[index])), None)
            if self.limits.stop_at_timeout or late is None:
                return [done.get(index, found[index]) for index in range(len(self.tests))]
            done |= {index: found[index] for index in rest if index <= late}
            skip.append(late)

    async def _look_at_values(self, checks: list[list[Check]], skip: list[int]) -> Found:
        calls = [[check.call for check in test] for test in checks]
        imports = [test[0].imports for test in checks]
        remains = await self.execute(self._request("calls", {"calls": calls, "imports": imports, "skip": skip}))
        return verdict.of_calls(checks, remains, skip)

    async def _look_plainly(self, skip: list[int]) -> Found:
        payload = {"tests": self.tests, "given": self.given, "skip": skip}
        remains = await self.execute(self._request("tests", payload))
        return [*verdict.of_plain(len(self.tests), remains, skip)]

    async def _look_as_judge(self, plain: list[TestResult], restores: bool) -> Remains:
        """The judge follows every test that has ended: one that failed may still have made what others use."""
        left_out = [index for index, result in enumerate(plain) if not _has_ended(result)]
        judge = {"tests": self.tests, "given": self.given, "skip": left_out, "restores": restores}
        return await self.execute(self._request("serve", {}, judge))

    def _request(self, mode: str, payload: dict[str, Any], judge: dict[str, Any] | None = None) -> RunRequest:
        limits = self.limits if judge is None else self.limits.judged
        return RunRequest(mode, {"program": self.program, "seed": self.seed, **payload}, limits, judge=judge)


def _is_timeout(result: TestResult | None) -> bool:
    return result is not None and result.outcome is Outcome.TIMEOUT


def _has_ended(result: TestResult) -> bool:
    return result.outcome in (Outcome.PASSED, Outcome.WRONG, Outcome.ERROR, Outcome.INVALID_TEST)
