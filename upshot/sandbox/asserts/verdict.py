"""Computes the result of a run, and the outcome of each of its tests, from what the run left. Pure functions."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from upshot.sandbox.asserts.values import Check, holds
from upshot.sandbox.outcome import CompileResult, Outcome, RunResult, TestResult


@dataclass(frozen=True)
class Remains:
    """Everything a run left: how it ended, what it wrote, what it returned."""

    status: int = 0
    """The wait status of the program's process."""
    why: str | None = None
    """'cpu' or 'wall' if a clock ended it."""
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
    """The result lines up to the first invalid one; the program may have written anything, and millions of lines."""
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
        name = next((known.name for known in signal.Signals if known == number), number)
        return Outcome.ERROR, f"ended by signal {name}"
    return None


def of_calls(checks: list[list[Check]], remains: Remains) -> list[TestResult | None]:
    """One result per test from the values that the child returned; None if data alone does not decide.

    If every value is plain data, no other look is needed: an honest program that passes plainly returns data equal to
    the literal, and a program that returns such data passes.
    """
    lines = _line_up(remains.lines, len(checks))
    return [_of_line(line, remains, check) for line, check in zip(lines, checks, strict=True)]


def of_plain(count: int, remains: Remains) -> list[TestResult]:
    """One result per test of the plain look, in which the program and its tests share one process."""
    unreadable = TestResult(Outcome.ERROR, None, "unreadable result")
    return [_of_line(line, remains, None) or unreadable for line in _line_up(remains.lines, count)]


def of_judged(plain: list[TestResult], remains: Remains) -> list[TestResult]:
    """Combine the second look with the first: tests that passed plainly are confirmed or unconfirmed."""
    if remains.fault is not None:
        fault = TestResult(Outcome.SANDBOX_FAULT, None, remains.fault)
        return [fault if result.passed else result for result in plain]
    ended = ending(remains)
    missing = {"u": ended[1] if ended else "the program was not there to be asked"}
    lines = [*remains.lines[: len(plain)], *[missing] * (len(plain) - len(remains.lines))]
    results = []
    for line, result in zip(lines, plain, strict=True):
        doubted = TestResult(Outcome.UNCONFIRMED, result.seconds, str(line.get("u") or "unreadable result")[:500])
        results.append(doubted if result.passed and line.get("p") is not True else result)
    return results


def _line_up(lines: list[dict[str, Any]], count: int) -> list[dict[str, Any] | None]:
    """The line of each test, or None; a program that did not load has one line for all tests."""
    if lines and "load" in lines[0]:
        return [lines[0]] * count
    return [*lines[:count], *[None] * (count - len(lines))]


def _of_line(line: dict[str, Any] | None, remains: Remains, checks: list[Check] | None) -> TestResult | None:
    if line is None or remains.fault is not None:
        outcome, detail = ending(remains) or (Outcome.ERROR, "the program ended before this test was done")
        return TestResult(outcome, None, detail)
    try:
        return _read_line(line, remains, checks)
    except Exception as error:  # whatever a program sends can only make its own test fail
        return TestResult(Outcome.ERROR, None, f"unreadable result: {error!r}"[:300])


def _read_line(line: dict[str, Any], remains: Remains, checks: list[Check] | None) -> TestResult | None:
    seconds = min(max(0.0, float(line["t"])), remains.wall) if "t" in line else None
    if failure := line.get("load") or line.get("e"):
        name, traceback = map(str, failure)
        ended = Outcome.OUTPUT_LIMIT if remains.stdout_cut or remains.stderr_cut else Outcome.ERROR
        return TestResult(Outcome.OUT_OF_MEMORY if name == "MemoryError" else ended, seconds, traceback[-2000:])
    if checks is None:
        passed = line.get("p") is True
        return TestResult(Outcome.PASSED, seconds) if passed else TestResult(Outcome.WRONG, seconds, str(line["w"]))
    if "big" in line or "u" in line:
        return None
    held = [holds(check, value) for check, value in zip(checks, line["v"], strict=True)]
    if None in held:
        return None
    if False not in held:
        return TestResult(Outcome.PASSED, seconds)
    index = held.index(False)
    shown = f"{checks[index].call[:300]} returned {json.dumps(line['v'][index])[:200]}"
    return TestResult(Outcome.WRONG, seconds, shown)


def of_script(remains: Remains, fetch: Sequence[str] = ()) -> RunResult:
    """The result of a Python program run as a script, with the requested files if it left them."""
    ended = ending(remains)
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
    """The files among the lines; the program can write lines too, so only requested and readable files are kept."""
    files, names = {}, set(wanted)
    for line in lines:
        pair = line.get("file")
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(part, str) for part in pair):
            continue
        with contextlib.suppress(ValueError):
            if pair[0] in names:
                files[pair[0]] = base64.b64decode(pair[1], validate=True)
    return files


def of_native_stdio(remains: Remains, expected: Sequence[str]) -> list[TestResult]:
    """One result per stdin/stdout test of a program that ran on all inputs, with its outputs concatenated."""
    whole, begin, results = of_native(remains), 0, []
    for wanted, ran in zip(expected, (line["run"] for line in remains.lines if "run" in line), strict=False):
        end = begin + ran["size"]
        inner, stdout = _of_inner(remains, ran), remains.stdout[begin:end]
        ran_alone = of_script(replace(inner, stdout=stdout, stdout_cut=ran["cut"], stderr_cut=False))
        begin, result = end, ran_alone.as_test(passed=same_output(ran_alone.stdout, wanted))
        results.append(replace(result, detail=result.detail or ran["errors"]))
    rest = whole.as_test(passed=False)
    if results and results[-1].outcome is Outcome.TIMEOUT:
        rest = TestResult(Outcome.TIMEOUT, None, "not run: an earlier test ran out of time")
    elif rest.outcome in (Outcome.PASSED, Outcome.WRONG):
        rest = TestResult(Outcome.ERROR, None, "the program ended before this test was done")
    return results + [rest] * (len(expected) - len(results))


def _of_inner(remains: Remains, ran: dict[str, Any]) -> Remains:
    """What the program itself left; the driver reports how it ended."""
    status = ran["status"] << 8 if ran["status"] >= 0 else -ran["status"]
    return replace(remains, status=status, why=ran["why"], wall=ran["t"])


def of_native(remains: Remains, fetch: Sequence[str] = ()) -> RunResult:
    """The result of a compiled or interpreted program, from the report of the driver, which it cannot reach."""
    base = of_script(remains, fetch)
    compiled = next((line["compile"] for line in remains.lines if "compile" in line), None)
    ran = next((line["run"] for line in remains.lines if "run" in line), None)
    compile_result = None
    if compiled is not None:
        ok = compiled["status"] == 0 and not compiled["why"]
        compile_result = CompileResult(ok, compiled["t"], compiled["status"], compiled["output"], bool(compiled["why"]))
        if not ok:
            base = replace(base, outcome=Outcome.ERROR, exit_code=None, detail="it does not compile")
            return replace(base, compiled=compile_result)
    result = base if ran is None or ending(remains) else of_script(_of_inner(remains, ran), fetch)
    return replace(result, compiled=compile_result)


def same_output(actual: str, expected: str) -> bool:
    """Whether a program printed the expected output, compared as in contests: word by word, line by line.

    Blanks between words and blank lines do not count. If a decimal fraction is expected, the answer may be off by a
    millionth; a whole number must be printed as one. If the expected output draws with blanks (a line begins with one,
    or has two in a row), they are part of the answer.
    """
    mine, wanted = _without_blank_ends(actual), _without_blank_ends(expected)
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
    """Whether a decimal fraction is expected, and the word is a number that differs from it by at most a millionth."""
    if not any(mark in expected for mark in ".eE"):
        return False
    if not (_FRACTION.fullmatch(word) and _FRACTION.fullmatch(expected)):
        return False
    mine, wanted = float(word), float(expected)
    return abs(mine - wanted) <= 1e-6 * max(1.0, abs(wanted))


def _without_blank_ends(text: str) -> str:
    text = text.rstrip()
    return text[text.rfind("\n", 0, len(text) - len(text.lstrip())) + 1 :]
