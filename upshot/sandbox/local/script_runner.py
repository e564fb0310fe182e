"""Tests on top of a plain `run`: for runners that can only run a script. The verdict is still taken outside.

Split asserts: the script prints the values, tagged with a number only this run knows, and they are compared here. Other
asserts run in the script itself and end by printing that number: an early exit passes nothing, but a program that
reads its own source could. The local sandbox and our server have no such gap.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path

from upshot.sandbox.asserts import verdict
from upshot.sandbox.asserts.split import Check, split
from upshot.sandbox.asserts.verdict import Remains
from upshot.sandbox.inside import cases, plain
from upshot.sandbox.limits import Limits
from upshot.sandbox.outcome import Outcome, RunResult, StdioTest, TestResult
from upshot.sandbox.runner import CodeRunner

_VALUES = """
def _upshot_main():
    import json, sys, time, traceback
    space = {{"__name__": "upshot_plain"}}
    exec({plain!r}, space)
    say = sys.stdout.write
    program = {{"__name__": "program"}}
    try:
        exec(compile({program!r}, "program.py", "exec"), program)
    except BaseException as error:
        line = {{"load": [type(error).__name__, traceback.format_exc()[-2000:]], "t": 0}}
        say("\\n{nonce}" + json.dumps(line) + "\\n")
        return
    for imports, calls in {calls!r}:
        start = time.perf_counter()
        try:
            exec(imports, program)
            line = {{"v": [space["encode"](eval(call, program)) for call in calls]}}
        except BaseException as error:
            line = {{"e": [type(error).__name__, traceback.format_exc()[-2000:]]}}
        line["t"] = time.perf_counter() - start
        say("\\n{nonce}" + json.dumps(line) + "\\n")
    sys.stdout.flush()
_upshot_main()
"""
_JUDGED = """
def _upshot_main():
    import ast
    space = {{"__name__": "upshot_cases"}}
    exec({cases!r}, space)
    checked = space["Checked"]()
    space["run"](ast.parse({test!r}), globals(), checked)
    print("\\n{nonce}" + str(checked.count))
_upshot_main()
"""


class ScriptRunner(CodeRunner):
    """A runner whose subclasses supply `_run`."""

    async def test_program(self, program: str, tests: Sequence[str], limits: Limits | None = None) -> list[TestResult]:
        limits = limits or self.limits
        checks = [split(test) for test in tests]
        if all(check is not None for check in checks):
            return await self._values(program, [check for check in checks if check is not None], limits)
        done: list[TestResult] = []
        text = Path(cases.__file__).read_text()
        for test in tests:
            if limits.stop_at_timeout and done and done[-1].outcome is Outcome.TIMEOUT:
                done.append(TestResult(Outcome.TIMEOUT, None, "not run: an earlier test ran out of time"))
                continue
            nonce = secrets.token_hex(16)
            source = f"{program}\n{_JUDGED.format(cases=text, test=test, nonce=nonce)}"
            result = await self.run(source, limits=limits)
            counts = [line.removeprefix(nonce) for line in result.stdout.splitlines() if line.startswith(nonce)]
            done.append(_ended(result, passed=bool(counts) and counts[-1] != "0"))
        return without_invalid(tests, done)

    async def _values(self, program: str, checks: list[list[Check]], limits: Limits) -> list[TestResult]:
        nonce = secrets.token_hex(16)
        calls = [(test[0].imports, [check.call for check in test]) for test in checks]
        source = _VALUES.format(plain=Path(plain.__file__).read_text(), program=program, calls=calls, nonce=nonce)
        result = await self.run(source, limits=limits)
        lines = []
        for text in result.stdout.splitlines():
            if text.startswith(nonce):
                lines += verdict.parse_lines(text.removeprefix(nonce).encode(), 1)
        remains = Remains(
            why="cpu" if result.outcome is Outcome.TIMEOUT else None,
            fault=result.detail if result.outcome is Outcome.SANDBOX_FAULT else None,
            wall=result.wall_seconds,
            cpu=result.cpu_seconds,
            stdout_cut=result.stdout_cut,
            lines=lines,
        )
        return verdict.of_calls(checks, remains)

    async def test_stdio(
        self, program: str, tests: Sequence[StdioTest], limits: Limits | None = None
    ) -> list[TestResult]:
        limits = limits or self.limits
        done: list[TestResult] = []
        for test in tests:
            if limits.stop_at_timeout and done and done[-1].outcome is Outcome.TIMEOUT:
                done.append(TestResult(Outcome.TIMEOUT, None, "not run: an earlier test ran out of time"))
                continue
            result = await self.run(program, stdin=test.input, limits=limits)
            done.append(_ended(result, passed=verdict.same_output(result.stdout.encode(), test.output)))
        return done


def without_invalid(tests: Sequence[str], results: list[TestResult]) -> list[TestResult]:
    """The results, with `invalid_test` for those whose test can tell nothing of any program."""
    faults = cases.faults([cases.parse(test) for test in tests], judged=False)
    return [
        TestResult(Outcome.INVALID_TEST, None, faults[index]) if index in faults else result
        for index, result in enumerate(results)
    ]


def _ended(result: RunResult, passed: bool) -> TestResult:
    if result.outcome is Outcome.PASSED:
        outcome = Outcome.PASSED if passed else Outcome.WRONG
        return TestResult(outcome, result.wall_seconds, "" if passed else f"printed {result.stdout[:200]!r}")
    failed_assert = result.outcome is Outcome.ERROR and "AssertionError" in result.stderr
    outcome = Outcome.WRONG if failed_assert else result.outcome
    return TestResult(outcome, result.wall_seconds, result.detail or result.stderr[-2000:])
