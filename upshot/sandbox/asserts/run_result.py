"""From what a run left behind to a RunResult. Pure functions."""

from __future__ import annotations

import base64
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from upshot.sandbox.asserts import verdict
from upshot.sandbox.asserts.verdict import Remains
from upshot.sandbox.outcome import CompileResult, Outcome, RunResult, TestResult


def of_stdio(remains: Remains, expected: str) -> TestResult:
    """The result of a stdin/stdout test."""
    result = of_script(remains)
    if result.outcome is not Outcome.PASSED:
        return TestResult(result.outcome, remains.wall, result.detail or result.stderr[-2000:])
    if verdict.same_output(remains.stdout, expected):
        return TestResult(Outcome.PASSED, remains.wall)
    return TestResult(Outcome.WRONG, remains.wall, f"printed {result.stdout[:200]!r}")


def of_script(remains: Remains, fetch: Sequence[str] = ()) -> RunResult:
    """The result of a Python program run as a script, with the files to fetch where it left them."""
    ended = verdict.ending(remains)
    exit_code = os.WEXITSTATUS(remains.status) if os.WIFEXITED(remains.status) else -os.WTERMSIG(remains.status)
    errors = [line["e"][0] for line in remains.lines if isinstance(line.get("e"), list) and line["e"]]
    outcome, detail = ended or (Outcome.PASSED if exit_code == 0 else Outcome.ERROR, "")
    if ended is None and remains.stdout_cut | remains.stderr_cut:
        outcome, detail = Outcome.OUTPUT_LIMIT, "output beyond the limit was cut"
    elif ended is None and exit_code and "MemoryError" in errors:
        outcome, detail = Outcome.OUT_OF_MEMORY, "MemoryError"
    return RunResult(
        outcome=outcome,
        exit_code=None if ended and ended[0] in (Outcome.SANDBOX_FAULT, Outcome.TIMEOUT) else exit_code,
        stdout=remains.stdout.decode(errors="replace"),
        stderr=remains.stderr.decode(errors="replace"),
        stdout_cut=remains.stdout_cut,
        stderr_cut=remains.stderr_cut,
        wall_seconds=remains.wall,
        cpu_seconds=remains.cpu,
        max_rss_kb=remains.max_rss_kb,
        detail=detail,
        files=_files(remains.lines, fetch),
    )


def _files(lines: list[dict[str, Any]], wanted: Sequence[str]) -> dict[str, bytes]:
    """The files among the lines; the program can write lines too, so nothing unasked for and nothing unreadable."""
    found, names = {}, set(wanted)
    for line in lines:
        pair = line.get("file")
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(part, str) for part in pair):
            continue
        try:
            if pair[0] in names:
                found[pair[0]] = base64.b64decode(pair[1], validate=True)
        except ValueError:
            continue
    return found


def of_native_stdio(remains: Remains, expected: Sequence[str]) -> list[TestResult]:
    """One result per stdin/stdout test of a program that ran on all inputs, its outputs one behind the other."""
    whole, begin, found = of_native(remains), 0, []
    for wanted, ran in zip(expected, (line["run"] for line in remains.lines if "run" in line), strict=False):
        end = begin + ran["size"]
        one = replace(
            _of_inner(remains, ran), stdout=remains.stdout[begin:end], stdout_cut=ran["cut"], stderr_cut=False
        )
        begin, result = end, of_stdio(one, wanted)
        found.append(replace(result, detail=result.detail or ran["said"]))
    rest = whole.as_test(passed=False)
    if found and found[-1].outcome is Outcome.TIMEOUT:
        rest = TestResult(Outcome.TIMEOUT, None, "not run: an earlier test ran out of time")
    elif rest.outcome in (Outcome.PASSED, Outcome.WRONG):
        rest = TestResult(Outcome.ERROR, None, "the program ended before this test was done")
    return found + [rest] * (len(expected) - len(found))


def _of_inner(remains: Remains, ran: dict[str, Any]) -> Remains:
    """What is left of the program itself, of which the driver says how it ended."""
    status = ran["status"] << 8 if ran["status"] >= 0 else -ran["status"]
    return replace(remains, status=status, why=ran["why"], wall=ran["t"])


def of_native(remains: Remains, fetch: Sequence[str] = ()) -> RunResult:
    """The result of a compiled or interpreted program, from the driver's report; the driver is out of its reach."""
    base = of_script(remains, fetch)
    compiled = next((line["compile"] for line in remains.lines if "compile" in line), None)
    ran = next((line["run"] for line in remains.lines if "run" in line), None)
    compile_result = None
    if compiled is not None:
        ok = compiled["status"] == 0 and not compiled["why"]
        compile_result = CompileResult(ok, compiled["t"], compiled["status"], compiled["output"], bool(compiled["why"]))
        if not ok:
            return replace(
                base, outcome=Outcome.ERROR, exit_code=None, detail="it does not compile", compiled=compile_result
            )
    if ran is None or verdict.ending(remains):
        return replace(base, compiled=compile_result)
    return replace(of_script(_of_inner(remains, ran), fetch), compiled=compile_result)
