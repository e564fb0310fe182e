"""From what a run left behind to the outcome of each test. Pure functions."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
from dataclasses import dataclass, field
from typing import Any

from upshot.sandbox.asserts.values import Check, holds
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


def of_calls(checks: list[list[Check]], remains: Remains) -> list[TestResult | None]:
    """One result per test from the values the child returned; None where data alone does not tell.

    Where every value is plain data nothing else has to be looked at: an honest program that passes plainly returns
    data equal to the literal, and one that returns such data passes.
    """
    lines = _line_up(remains.lines, len(checks))
    return [_of_line(line, remains, check) for line, check in zip(lines, checks, strict=True)]


def of_plain(count: int, remains: Remains) -> list[TestResult]:
    """One result per test of the plain look: what the program and its tests came to in one process."""
    unreadable = TestResult(Outcome.ERROR, None, "unreadable result")
    return [_of_line(line, remains, None) or unreadable for line in _line_up(remains.lines, count)]


def of_judged(plain: list[TestResult], remains: Remains) -> list[TestResult]:
    """What the second look makes of the first: those that passed plainly are confirmed, or they are not."""
    if remains.fault is not None:
        fault = TestResult(Outcome.SANDBOX_FAULT, None, remains.fault)
        return [fault if result.passed else result for result in plain]
    ended = ending(remains)
    missing = {"u": ended[1] if ended else "the program was not there to be asked"}
    lines = [*remains.lines[: len(plain)], *[missing] * (len(plain) - len(remains.lines))]
    return [_of_judge(line, result) if result.passed else result for line, result in zip(lines, plain, strict=True)]


def _of_judge(line: dict[str, Any], plain: TestResult) -> TestResult:
    if line.get("p") is True:
        return plain
    return TestResult(Outcome.UNCONFIRMED, plain.seconds, str(line.get("u") or "unreadable result")[:500])


def _line_up(lines: list[dict[str, Any]], count: int) -> list[dict[str, Any] | None]:
    """The line of each test, None where there is none; a program that did not load has one for all."""
    if lines and "load" in lines[0]:
        return [lines[0]] * count
    return [*lines[:count], *[None] * (count - len(lines))]


def _of_line(line: dict[str, Any] | None, remains: Remains, checks: list[Check] | None) -> TestResult | None:
    if remains.fault is not None:
        return TestResult(Outcome.SANDBOX_FAULT, None, remains.fault)
    if line is None:
        outcome, detail = ending(remains) or (Outcome.ERROR, "the program ended before this test was done")
        return TestResult(outcome, None, detail)
    try:
        return _judge_line(line, remains, checks)
    except Exception as error:  # whatever a program sends is at worst its own failure
        return TestResult(Outcome.ERROR, None, f"unreadable result: {error!r}"[:300])


def _judge_line(line: dict[str, Any], remains: Remains, checks: list[Check] | None) -> TestResult | None:
    seconds = min(max(0.0, float(line["t"])), remains.wall) if "t" in line else None
    if "load" in line or "e" in line:
        return failure(line.get("load") or line.get("e"), remains, seconds)
    if checks is None:
        if line.get("p") is True:
            return TestResult(Outcome.PASSED, seconds)
        return TestResult(Outcome.WRONG, seconds, str(line["w"]))
    if "big" in line or "u" in line:
        return None
    values = line["v"]
    if len(values) != len(checks):
        return TestResult(Outcome.ERROR, seconds, "unreadable result: not one value per call")
    held = [holds(check, value) for check, value in zip(checks, values, strict=True)]
    if False in held:
        index = held.index(False)
        value = values[index][:200] if isinstance(values[index], list | str) else values[index]
        shown = f"{checks[index].call[:300]} returned {json.dumps(value)[:200]}"
        return None if None in held else TestResult(Outcome.WRONG, seconds, shown)
    return None if None in held else TestResult(Outcome.PASSED, seconds)


def same_output(actual: bytes, expected: str) -> bool:
    """Whether a program printed what it should, as contests compare it: word by word, line by line.

    Blanks between words and blank lines do not count. Where a decimal fraction is expected the answer may be off by a
    millionth; a whole number must be printed as one. Where the expected output draws with blanks (a line begins with
    one, or has two in a row), they are part of the answer.
    """
    mine, wanted = _without_blank_ends(actual.decode(errors="replace")), _without_blank_ends(expected)
    if mine.count("\n") > 2 * wanted.count("\n") + 1000:
        return False  # before anything is split: a program may print millions of lines
    if _DRAWN.search(wanted):
        rows = [line.rstrip() for line in mine.split("\n")], [line.rstrip() for line in wanted.split("\n")]
        return rows[0] == rows[1]
    ours, theirs = ([words for line in text.split("\n") if (words := line.split())] for text in (mine, wanted))
    if [*map(len, ours)] != [*map(len, theirs)]:
        return False
    pairs = zip(itertools.chain(*ours), itertools.chain(*theirs), strict=True)
    return all(word == other or _is_close(word, other) for word, other in pairs)


_DRAWN = re.compile(r"^[ \t][^\S\n]*\S|\S[ \t]{2,}\S", re.MULTILINE)
_FRACTION = re.compile(r"[+-]?(\d{1,40}\.\d{0,40}|\.\d{1,40}|\d{1,40})([eE][+-]?\d{1,3})?")


def _is_close(word: str, expected: str) -> bool:
    """Whether a decimal fraction is expected, and the word is a number that differs from it by a millionth at most."""
    if not any(mark in expected for mark in ".eE"):
        return False
    if not (_FRACTION.fullmatch(word) and _FRACTION.fullmatch(expected)):
        return False
    mine, wanted = float(word), float(expected)
    return abs(mine - wanted) <= 1e-6 * max(1.0, abs(wanted))


def _without_blank_ends(text: str) -> str:
    text = text.rstrip()
    return text[text.rfind("\n", 0, len(text) - len(text.lstrip())) + 1 :]
