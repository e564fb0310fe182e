"""From what a run left behind to the outcome of each test. Pure functions."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import dataclass, field
from typing import Any

from upshot.sandbox.asserts.compare import holds
from upshot.sandbox.asserts.split import Check
from upshot.sandbox.outcome import Outcome, TestResult


@dataclass(frozen=True)
class Remains:
    """Everything a run left: how it ended, what it wrote, what it returned."""

    status: int = 0
    """The wait status of the program's process."""
    why: str | None = None
    """'cpu' or 'wall' where a clock ended it."""
    fault: str | None = None
    """Why the sandbox, not the program, failed."""
    cpu: float = 0.0
    wall: float = 0.0
    max_rss_kb: int = 0
    oom: bool = False
    stdout: bytes = b""
    stderr: bytes = b""
    stdout_cut: bool = False
    stderr_cut: bool = False
    lines: list[dict[str, Any]] = field(default_factory=list)


def parse_lines(data: bytes, most: int = 64) -> list[dict[str, Any]]:
    """The first result lines, up to one that is not; the program may have written anything, and millions of it."""
    lines = []
    for raw in data.split(b"\n", most)[:most]:
        if not raw:
            continue
        try:
            line = json.loads(raw)
        except (ValueError, RecursionError, MemoryError):
            break
        if not isinstance(line, dict):
            break
        lines.append(line)
    return lines


def ending(remains: Remains) -> tuple[Outcome, str] | None:
    """How a run that did not end by itself ended; None for one that did."""
    if remains.fault is not None:
        return Outcome.SANDBOX_FAULT, remains.fault
    if remains.why is not None:
        clock = f"{remains.cpu:.2f} s of CPU, {remains.wall:.2f} s in all"
        return Outcome.TIMEOUT, f"{'CPU' if remains.why == 'cpu' else 'wall'} limit reached after {clock}"
    if remains.oom:
        return Outcome.OUT_OF_MEMORY, "ended by the kernel: the memory limit of the run was reached"
    if os.WIFSIGNALED(remains.status):
        number = os.WTERMSIG(remains.status)
        if number == signal.SIGSYS:
            return Outcome.KILLED_BY_POLICY, "ended by the kernel: a forbidden system call"
        if number == signal.SIGXCPU:
            return Outcome.TIMEOUT, "CPU limit reached"
        if remains.stdout_cut or remains.stderr_cut:
            return Outcome.OUTPUT_LIMIT, "output beyond the limit"
        return Outcome.ERROR, f"ended by signal {_signal_name(number)}"
    return None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


def failure(described: Any, remains: Remains, seconds: float | None = None) -> TestResult:
    """The result for an exception the child described as [type, traceback tail]."""
    name, tail = (
        (str(described[0]), str(described[1])) if isinstance(described, list) and len(described) == 2 else ("", "")
    )
    outcome = Outcome.ERROR
    if name == "MemoryError":
        outcome = Outcome.OUT_OF_MEMORY
    elif remains.stdout_cut or remains.stderr_cut:
        outcome = Outcome.OUTPUT_LIMIT
    return TestResult(outcome, seconds, tail[-2000:])


def of_calls(checks: list[list[Check]], remains: Remains) -> list[TestResult]:
    """One result per test from the values the child returned."""
    return [_of_line(_line(remains.lines, index), remains, checks[index]) for index in range(len(checks))]


def of_judged(count: int, remains: Remains) -> list[TestResult]:
    """One result per test from what the judge wrote: which tests can tell nothing, then a line for each."""
    invalid = remains.lines[0].get("invalid", {}) if remains.lines else {}
    return [
        TestResult(Outcome.INVALID_TEST, None, invalid[str(index)])
        if str(index) in invalid
        else _of_line(_line(remains.lines[1:], index), remains, None)
        for index in range(count)
    ]


def _line(lines: list[dict[str, Any]], index: int) -> dict[str, Any] | None:
    if lines and "load" in lines[0]:
        return lines[0]
    return lines[index] if index < len(lines) else None


def _of_line(line: dict[str, Any] | None, remains: Remains, checks: list[Check] | None) -> TestResult:
    if remains.fault is not None:
        return TestResult(Outcome.SANDBOX_FAULT, None, remains.fault)
    if line is None or "gone" in line:
        outcome, detail = ending(remains) or (Outcome.ERROR, "the program ended before this test was done")
        return TestResult(outcome, None, detail)
    try:
        return _judge_line(line, remains, checks)
    except Exception as error:  # whatever a program sends is at worst its own failure
        return TestResult(Outcome.ERROR, None, f"unreadable result: {error!r}"[:300])


def _judge_line(line: dict[str, Any], remains: Remains, checks: list[Check] | None) -> TestResult:
    if "big" in line:
        return TestResult(Outcome.OUTPUT_LIMIT, None, "the returned value is larger than the result limit")
    seconds = min(max(0.0, float(line["t"])), remains.wall) if "t" in line else None
    if "load" in line or "e" in line:
        return failure(line.get("load") or line.get("e"), remains, seconds)
    if checks is None:
        if "x" in line:
            return TestResult(Outcome.INVALID_TEST, seconds, str(line["x"]))
        if line.get("p") is True:
            return TestResult(Outcome.PASSED, seconds)
        return TestResult(Outcome.WRONG, seconds, str(line["w"]))
    values = line["v"]
    if len(values) != len(checks):
        return TestResult(Outcome.ERROR, seconds, "unreadable result: not one value per call")
    for check, value in zip(checks, values, strict=True):
        if not holds(check, value):
            return TestResult(Outcome.WRONG, seconds, f"{check.call[:300]} returned {json.dumps(value)[:200]}")
    return TestResult(Outcome.PASSED, seconds)


def same_output(actual: bytes, expected: str) -> bool:
    """Whether a program printed what it should; blanks at line ends and blank lines at either end do not count."""
    mine, wanted = _without_blank_ends(actual.decode(errors="replace")), _without_blank_ends(expected)
    if mine.count("\n") != wanted.count("\n"):
        return False  # before anything is split: a program may print millions of lines
    return all(a.rstrip() == b.rstrip() for a, b in zip(mine.split("\n"), wanted.split("\n"), strict=True))


def _without_blank_ends(text: str) -> str:
    text = text.rstrip()
    return text[text.rfind("\n", 0, len(text) - len(text.lstrip())) + 1 :]
