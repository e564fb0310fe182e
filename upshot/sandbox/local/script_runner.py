"""Tests on top of a plain `run`: for runners that can only run a script, and for the simplest one, a bare process.

The verdict is still made outside if possible. If all tests can be split, the script prints the values, tagged with a
number that only this run knows, and they are compared here. Other tests are appended to the program and end by printing
that number: a failure counts, but a pass is unconfirmed, because there is no judge. The local sandbox and our server
have one.

The script contains the text of `plain.py`, which imports only the standard library.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from upshot.core.errors import UserError
from upshot.core.process import end_group
from upshot.sandbox.asserts import verdict
from upshot.sandbox.asserts.values import Check, split
from upshot.sandbox.asserts.verdict import Remains
from upshot.sandbox.inside import cases, plain
from upshot.sandbox.limits import Limits
from upshot.sandbox.local.languages import canonical
from upshot.sandbox.outcome import Outcome, RunResult, TestResult
from upshot.sandbox.runner import NO_JUDGE, CodeRunner, ProgramJob, run_one_by_one

_VALUES = """
def _upshot_main():
    import json, sys, traceback
    space, program, say = {{"__name__": "upshot_plain"}}, {{"__name__": "program"}}, sys.stdout.write
    exec({plain!r}, space)
    def load():
        exec(compile({program!r}, "program.py", "exec"), program)
        return program
    def put(line):
        say("\\n{nonce}" + json.dumps(line) + "\\n")
    def describe(error):
        return [type(error).__name__, traceback.format_exc()[-2000:]]
    space["answer_calls"](load, {calls!r}, put, describe)
    sys.stdout.flush()
_upshot_main()
"""


class ScriptRunner(CodeRunner):
    """A runner whose subclasses supply `_run`."""

    async def _test(self, program: str, tests: Sequence[str], given: str, limits: Limits) -> list[TestResult]:
        checks = [check for check in map(split, tests) if check is not None]
        values = await self._compare_values(program, checks, limits) if len(checks) == len(tests) else [None]
        if None not in values:
            return [result for result in values if result is not None]

        async def run_test(test: str) -> TestResult:
            nonce = secrets.token_hex(16)  # printed at the end: a program that ends before its test has not passed it
            result = await self.run(f"{program}\n{cases.standalone(test)}\nprint('\\n{nonce}')", limits=limits)
            plain = result.as_test(passed=f"\n{nonce}" in result.stdout)
            return replace(plain, outcome=Outcome.UNCONFIRMED, detail=NO_JUDGE) if plain.passed else plain

        return await run_one_by_one(tests, run_test)

    async def _compare_values(self, program: str, checks: list[list[Check]], limits: Limits) -> list[TestResult | None]:
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


class BareRunner(ScriptRunner):
    """One unsandboxed Python process per program. UNSAFE: for programs you wrote, and for comparison.

    The program has the user's own rights: it reads files, uses the network and can do anything to this account. So this
    runner is used only if it is named explicitly.
    """

    def __init__(self, concurrency: int | None = None, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self._gate = asyncio.Semaphore(concurrency or os.cpu_count() or 1)

    async def _run(self, job: ProgramJob) -> RunResult:
        if canonical(job.language) != "python":
            raise UserError(f"the subprocess runner runs python only, not {job.language!r}; use a sandbox")
        async with self._gate:
            with tempfile.TemporaryDirectory(prefix="upshot-bare-") as folder:
                for name, data in {**job.files, "program.py": job.code.encode()}.items():
                    path = Path(folder, name)
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(data)
                result = await self._process(folder, job.stdin, job.limits)
                files = {name: Path(folder, name).read_bytes() for name in job.fetch if Path(folder, name).is_file()}
        return replace(result, files=files)

    async def _process(self, folder: str, stdin: str, limits: Limits) -> RunResult:
        started = time.monotonic()
        pipes: Any = dict.fromkeys(("stdin", "stdout", "stderr"), asyncio.subprocess.PIPE)
        command = (sys.executable, "program.py")
        process = await asyncio.create_subprocess_exec(*command, cwd=folder, start_new_session=True, **pipes)
        seconds = int(limits.cpu_seconds) + 1
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(process.pid, resource.RLIMIT_CPU, (seconds, seconds))
            memory = (limits.memory_mb + 256) << 20
            resource.prlimit(process.pid, resource.RLIMIT_AS, (memory, memory))
        timed_out = False
        try:
            out, err = await asyncio.wait_for(process.communicate(stdin.encode()), limits.wall)
        except TimeoutError:
            timed_out, out, err = True, b"", b""
        finally:
            end_group(process.pid)
            await process.wait()
        code = process.returncode
        outcome = Outcome.OUT_OF_MEMORY if b"MemoryError" in err[-200:] else Outcome.ERROR
        if timed_out or code == -signal.SIGXCPU:
            outcome = Outcome.TIMEOUT
        elif code == 0:
            outcome = Outcome.PASSED
        most = limits.output_kb << 10
        stdout, stderr = (data[:most].decode(errors="replace") for data in (out, err))
        wall = time.monotonic() - started
        return RunResult(outcome, code, stdout, stderr, len(out) > most, len(err) > most, wall_seconds=wall)
