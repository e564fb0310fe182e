"""The sandbox in this process: slots behind walls, and the programs sent to them."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from upshot.core.errors import UserError
from upshot.core.time_limit import pause_clock
from upshot.sandbox.asserts import verdict
from upshot.sandbox.asserts.verdict import Remains
from upshot.sandbox.limits import Limits
from upshot.sandbox.local import languages, layers, looks
from upshot.sandbox.local.cgroup import PREFIX, Cgroups, list_abandoned
from upshot.sandbox.local.run import RunRequest
from upshot.sandbox.local.sessions import LocalSession
from upshot.sandbox.local.slots import Busy, SandboxMetrics, SandboxSlots
from upshot.sandbox.local.zygotes import ZygoteGone
from upshot.sandbox.outcome import RunResult, StdioTest, TestResult
from upshot.sandbox.runner import COMPILE_SECONDS, CodeRunner, ProgramJob, Session, output_kb

log = logging.getLogger("upshot.sandbox")
FORGOTTEN_SECONDS = 30.0
ANY_TEXT = "surrogatepass"
"""How an input is encoded: JSON may hold half a surrogate pair, which the program must handle."""
_IMPORT = re.compile(r"^[ \t]*(?:import|from)[ \t]+([\w., \t]+)", re.MULTILINE)
_NUMPY_USE = re.compile(r"^[^#\n]*\bnp\.", re.MULTILINE)  # tests often leave the import to the program
_SCIENTIFIC = {"pandas", "scipy", "sympy", "sklearn", "matplotlib"}


def tier_of(source: str) -> str:
    """The lightest tier that has a program's imports loaded."""
    words = {part.split(".")[0] for match in _IMPORT.finditer(source) for part in re.split(r"[,\s]+", match[1])}
    if words & _SCIENTIFIC:
        return "scientific"
    return "numpy" if "numpy" in words or _NUMPY_USE.search(source) else "plain"


class Sandbox(CodeRunner):
    """Runs untrusted programs in this process's own slots; an async context manager."""

    def __init__(
        self,
        slots: int | None = None,
        require: str | Iterable[str] = (),
        limits: Limits | None = None,
        queue: int = 4096,
        max_sessions: int = 256,
        session_idle_seconds: float = 600.0,
        disable: Iterable[str] = (),
    ) -> None:
        self.count = slots if slots is not None else 8 * (os.cpu_count() or 1)
        if self.count < 1:
            raise UserError(f"slots is {slots}; it must be at least 1")
        self.required = [require] if isinstance(require, str) else list(require)
        self.limits = limits or Limits()
        self.queue = queue
        self.max_sessions = max_sessions
        self.session_idle_seconds = session_idle_seconds
        self.disabled = set(disable)
        self.metrics = SandboxMetrics()
        self.layers: layers.Layers | None = None
        self._starting = asyncio.Lock()
        self._slots: SandboxSlots | None = None
        self._workdir: Path | None = None
        self._sessions: set[LocalSession] = set()
        self._session_count = 0
        self._opening = 0

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def start(self) -> None:
        """Find the machine's layers, refuse if a required one is missing, warm the first slot; does nothing twice."""
        async with self._starting:
            if self._slots is None:
                await self._start()

    async def _start(self) -> None:
        walls = await asyncio.to_thread(layers.probe, self.disabled)
        cgroups = Cgroups(disabled="cgroup" in self.disabled)
        walls.reasons.setdefault("cgroup", cgroups.reason)
        try:
            layers.demand(walls, cgroups.active, self.required)
            self._workdir = _make_workdir()
            self.layers = walls
            self._slots = SandboxSlots(self.count, self.queue, walls, cgroups, self._workdir)
            await self._slots.all[0].zygote("plain")  # find problems now, not with the first program
        except BaseException:
            cgroups.close()
            await self.aclose()
            raise
        described = self.describe_layers()
        log.info("sandbox with %d slots, layers %s", self.count, described)
        for name, word in described.items():
            if str(word).startswith("missing"):
                log.warning("sandbox without %s (%s)", name, word)

    def describe_layers(self) -> dict[str, Any]:
        """Each layer of isolation, with the reason if it is missing."""
        slots = self._open()
        return slots.layers.describe(slots.cgroups.active)

    @property
    def waiting(self) -> int:
        """The number of runs in the queue."""
        return self._open().waiting

    @property
    def running(self) -> int:
        """Runs in slots."""
        slots = self._open()
        return len(slots.all) - len(slots.free)

    async def aclose(self) -> None:
        """End every process of the sandbox and remove its files."""
        for session in list(self._sessions):
            await session.aclose()
        if self._slots is not None:
            self._slots.close()
            self._slots = None
        if self._workdir is not None:
            shutil.rmtree(self._workdir, ignore_errors=True)
            self._workdir = None

    async def _ready(self) -> SandboxSlots:
        """The slots, opened now if necessary: a runner from a recipe may be used before it is entered."""
        await self.start()
        return self._open()

    def _open(self) -> SandboxSlots:
        if self._slots is None:
            raise UserError("the sandbox is not open; use `async with Sandbox(...) as sandbox`")
        return self._slots

    async def _test(self, program: str, tests: Sequence[str], given: str, limits: Limits) -> list[TestResult]:
        tier = tier_of("\n".join((program, given, *tests)))
        done = await looks.decide(functools.partial(self._execute, tier), program, tests, given, limits)
        self.metrics.count_tests(done)
        return done

    async def _test_stdio(
        self, program: str, tests: Sequence[StdioTest], language: str, limits: Limits
    ) -> list[TestResult]:
        is_python = languages.canonical(language) == "python"
        run_tests = super()._test_stdio if is_python else self._test_native
        results = await run_tests(program, tests, language, limits)
        self.metrics.count_tests(results)
        return results

    async def _test_native(
        self, program: str, tests: Sequence[StdioTest], language: str, limits: Limits
    ) -> list[TestResult]:
        """Compile a program once, and run it on all inputs in one run of ours."""
        most = [output_kb(test, limits) for test in tests]
        payload = await self._native(language, limits, COMPILE_SECONDS) | {
            "program": program,
            "inputs": [test.input.encode(errors=ANY_TEXT) for test in tests],
            "most": [kb << 10 for kb in most],
        }
        budget = len(tests) * limits.wall + COMPILE_SECONDS + 5
        roomy = replace(limits, output_kb=max(sum(most), limits.output_kb), result_kb=limits.result_kb + 4 * len(tests))
        remains = await self._execute("native", RunRequest("native", payload, roomy, native_wall=budget))
        return verdict.of_native_stdio(remains, [test.output for test in tests])

    async def _run(self, job: ProgramJob) -> RunResult:
        limits, stdin = job.limits, job.stdin.encode(errors=ANY_TEXT)
        payload: dict[str, Any] = {"program": job.code, "files": dict(job.files), "fetch": list(job.fetch)}
        if languages.canonical(job.language) == "python":
            remains = await self._execute(tier_of(job.code), RunRequest("script", payload, limits, stdin))
            result = verdict.of_script(remains, job.fetch)
        else:
            payload |= await self._native(job.language, limits, job.compile_seconds)
            budget = limits.wall + job.compile_seconds + 5
            remains = await self._execute("native", RunRequest("native", payload, limits, stdin, native_wall=budget))
            result = verdict.of_native(remains, job.fetch)
        self.metrics.runs[result.outcome] += 1
        return result

    async def _native(self, name: str, limits: Limits, compile_seconds: float) -> dict[str, Any]:
        await self._ready()
        await asyncio.to_thread(languages.list_installed)  # asks the toolchains once
        language, tool = languages.find(name)
        if self._open().layers.namespaces is None:
            raise UserError(f"language '{name}' needs namespaces, which this machine lacks; only python runs here")
        fill = [[part.replace("{tool}", tool) for part in command] for command in (language.compile, language.run)]
        return {
            "source_name": language.source,
            "compile": fill[0],
            "run": fill[1],
            "compile_seconds": compile_seconds,
            "cpu_seconds": limits.cpu_seconds,
            "run_seconds": limits.wall,
            "environment": dict(language.environment),
        }

    async def session(self, limits: Limits | None = None) -> Session:
        slots = await self._ready()
        while len(self._sessions) + self._opening >= self.max_sessions:
            await self._evict_idle()
        self._opening += 1  # counted from now on, because others may ask while this one starts
        try:
            self._session_count += 1
            index, forget = self.count + self._session_count, self._sessions.discard
            session = await LocalSession.open(slots, index, limits or self.limits, self.session_idle_seconds, forget)
            self._sessions.add(session)
        finally:
            self._opening -= 1
        return session

    async def _evict_idle(self) -> None:
        """Make room: end the session that has been idle longest, if it seems abandoned."""
        oldest = min(self._sessions, key=lambda session: (session.busy, session.last_used), default=None)
        if oldest is None or oldest.busy or time.monotonic() - oldest.last_used < FORGOTTEN_SECONDS:
            raise Busy(len(self._sessions) + self._opening, FORGOTTEN_SECONDS)
        await oldest.aclose()

    @pause_clock
    async def _execute(self, tier: str, request: RunRequest) -> Remains:
        """Run one request, and once more if the sandbox itself failed the first time.

        A program cannot cause a fault (see `inside/zygote.py`), so the retry does not give it a second chance.
        """
        slots = await self._ready()
        try:
            slot = await slots.acquire(tier)
        except ZygoteGone as error:
            return Remains(fault=str(error))
        started = time.monotonic()
        try:
            for attempt in (1, 2):
                try:
                    remains = await request.run_on(await slot.zygote(tier))
                except (ZygoteGone, OSError) as error:
                    remains = Remains(fault=str(error))
                if remains.fault is None:
                    break
                self.metrics.faults += 1
                log.warning("sandbox fault in slot %d (attempt %d): %s", slot.index, attempt, remains.fault)
            return remains
        finally:
            held = time.monotonic() - started
            self.metrics.busy_seconds += held
            slots.release(slot, held)


def _make_workdir() -> Path:
    """A directory for this supervisor; directories of killed ones are removed first."""
    for old in list_abandoned(Path(tempfile.gettempdir())):
        shutil.rmtree(old, ignore_errors=True)
    path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))
    path.chmod(0o711)
    (path / "root").mkdir(mode=0o755)
    return path
