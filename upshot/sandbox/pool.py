"""The sandbox in this process: slots behind walls, and the programs sent to them."""

from __future__ import annotations

import asyncio
import base64
import logging
import marshal
import os
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from upshot.errors import UserError
from upshot.sandbox import languages, layers, verdict
from upshot.sandbox.cgroup import Cgroups
from upshot.sandbox.limits import Limits
from upshot.sandbox.memory_files import bounded_output, sealed_input, written
from upshot.sandbox.metrics import Metrics
from upshot.sandbox.outcome import CompileResult, Outcome, RunResult, StdioTest, TestResult
from upshot.sandbox.runner import CodeRunner, Session
from upshot.sandbox.sessions import LocalSession
from upshot.sandbox.slots import Slots
from upshot.sandbox.split import split
from upshot.sandbox.verdict import Remains
from upshot.sandbox.zygotes import Zygote, ZygoteGone

log = logging.getLogger("upshot.sandbox")
WORKDIR_PREFIX = "upshot-sandbox-"
PATIENCE = 10.0
"""Seconds beyond the wall cap before a silent zygote is given up."""
CGROUP_SLACK_MB = 64
_IMPORT = re.compile(r"^\s*(?:import|from)\s+([\w., \t]+)", re.MULTILINE)
_SCIENTIFIC = {"pandas", "scipy", "sympy", "sklearn", "matplotlib"}


def tier_of(source: str) -> str:
    """The lightest tier that has a program's imports loaded."""
    words = {part.split(".")[0] for match in _IMPORT.finditer(source) for part in re.split(r"[,\s]+", match[1])}
    if words & _SCIENTIFIC:
        return "scientific"
    return "numpy" if "numpy" in words else "plain"


class Sandbox(CodeRunner):
    """Runs untrusted programs in this process's own slots; an async context manager."""

    def __init__(
        self,
        slots: int | None = None,
        require: str | Iterable[str] = (),
        limits: Limits | None = None,
        queue: int = 4096,
        max_sessions: int = 64,
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
        self.metrics = Metrics()
        self.layers: layers.Layers | None = None
        self._slots: Slots | None = None
        self._workdir: Path | None = None
        self._sessions: set[LocalSession] = set()
        self._session_count = 0

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        await self.aclose()

    async def start(self) -> None:
        """Find the machine's layers, refuse if one demanded is missing, warm the first slot."""
        found = await asyncio.to_thread(layers.probe, self.disabled)
        cgroups = Cgroups(disabled="cgroup" in self.disabled)
        found.reasons.setdefault("cgroup", cgroups.reason)
        try:
            layers.demand(found, cgroups.active, self.required)
            self._workdir = _make_workdir()
            self.layers = found
            self._slots = Slots(self.count, self.queue, found, cgroups, self._workdir)
            await self._slots.warm("plain", 1)
        except BaseException:
            cgroups.close()
            await self.aclose()
            raise
        log.info("sandbox with %d slots, layers %s", self.count, self.describe_layers())

    def describe_layers(self) -> dict[str, Any]:
        """Each layer of isolation, and the reason where it is missing."""
        slots = self._open()
        return slots.layers.describe(slots.cgroups.active)

    @property
    def waiting(self) -> int:
        """Runs in the queue."""
        return len(self._open().waiting)

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

    def _open(self) -> Slots:
        if self._slots is None:
            raise UserError("the sandbox is not open; use `async with Sandbox(...) as sandbox`")
        return self._slots

    async def test_program(self, program: str, tests: Sequence[str], limits: Limits | None = None) -> list[TestResult]:
        limits = limits or self.limits
        checks = [split(test) for test in tests]
        done: list[TestResult] = []
        while len(done) < len(tests):
            rest = checks[len(done) :]
            found = await self._test_once(program, list(tests[len(done) :]), rest, limits)
            timeout = next((i for i, result in enumerate(found) if result.outcome is Outcome.TIMEOUT), None)
            if limits.stop_at_timeout or timeout is None:
                done += found
            else:
                done += found[: timeout + 1]
        self.metrics.count_tests(done)
        return done

    async def _test_once(self, program: str, tests: list[str], checks: list[Any], limits: Limits) -> list[TestResult]:
        tier = tier_of(program + "\n" + "\n".join(tests))
        if all(check is not None for check in checks):
            payload = {"program": program, "calls": [[check.call for check in test] for test in checks]}
            remains = await self._execute(tier, "calls", payload, b"", limits)
            return verdict.of_calls(checks, remains)
        remains = await self._execute(tier, "serve", {"program": program}, b"", limits, judge={"tests": tests})
        return verdict.of_judged(len(tests), remains)

    async def test_stdio(self, program: str, tests: Sequence[StdioTest], limits: Limits | None = None) -> list[TestResult]:
        limits = limits or self.limits
        done: list[TestResult] = []
        for test in tests:
            if limits.stop_at_timeout and done and done[-1].outcome is Outcome.TIMEOUT:
                done.append(TestResult(Outcome.TIMEOUT, None, "not run: an earlier test ran out of time"))
                continue
            remains = await self._execute(tier_of(program), "script", {"program": program}, test.input.encode(), limits)
            done.append(_stdio_result(remains, test.output))
        self.metrics.count_tests(done)
        return done

    async def run(
        self,
        code: str,
        language: str = "python",
        stdin: str = "",
        files: Mapping[str, bytes] | None = None,
        limits: Limits | None = None,
        fetch: Sequence[str] = (),
        compile_seconds: float = 20.0,
    ) -> RunResult:
        limits = limits or self.limits
        encoded = {name: base64.b64encode(data).decode() for name, data in (files or {}).items()}
        payload: dict[str, Any] = {"program": code, "files": encoded, "fetch": list(fetch)}
        if languages.canonical(language) == "python":
            result = _run_result(await self._execute(tier_of(code), "script", payload, stdin.encode(), limits))
        else:
            payload |= self._native(language, limits, compile_seconds)
            budget = limits.wall + compile_seconds + 5
            remains = await self._execute("native", "native", payload, stdin.encode(), limits, native_wall=budget)
            result = _native_result(remains)
        self.metrics.count_run(result)
        return result

    def _native(self, name: str, limits: Limits, compile_seconds: float) -> dict[str, Any]:
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
        if len(self._sessions) >= self.max_sessions:
            await self._evict_idle()
        return await LocalSession.open(self, self._open(), limits or self.limits)

    def next_session_index(self) -> int:
        """A number for a session's zygote, beyond the slots'."""
        self._session_count += 1
        return self.count + self._session_count

    def track_session(self, session: LocalSession) -> None:
        """Count a session that has been opened."""
        self._sessions.add(session)

    def forget_session(self, session: LocalSession) -> None:
        """Forget a session that has ended."""
        self._sessions.discard(session)

    async def _evict_idle(self) -> None:
        """Make room: end the session idle longest, if it has been idle at all."""
        idle = [session for session in self._sessions if not session.busy]
        if not idle:
            raise UserError(f"all {self.max_sessions} sessions are busy; raise max_sessions")
        await min(idle, key=lambda session: session.last_used).aclose()

    async def _execute(
        self,
        tier: str,
        mode: str,
        payload: dict[str, Any],
        stdin: bytes,
        limits: Limits,
        judge: dict[str, Any] | None = None,
        native_wall: float | None = None,
    ) -> Remains:
        """Run one request, once more if the sandbox itself failed the first time."""
        slots = self._open()
        slot = await slots.acquire(tier)
        started = time.monotonic()
        try:
            remains = Remains(fault="not run")
            for attempt in range(2):
                try:
                    zygote = await slot.zygote(tier)
                    run = _Run(mode, payload, stdin, limits, judge, native_wall, self._open().layers.namespaces is None)
                    remains = await run.on(zygote, slot.groups.get(tier))
                except ZygoteGone as error:
                    remains = Remains(fault=str(error))
                if remains.fault is None:
                    break
                self.metrics.faults += 1
                log.warning("sandbox fault in slot %d (attempt %d): %s", slot.index, attempt + 1, remains.fault)
            return remains
        finally:
            held = time.monotonic() - started
            self.metrics.busy_seconds += held
            slots.release(slot, held)


class _Run:
    """One request's memory files and message."""

    def __init__(
        self,
        mode: str,
        payload: dict[str, Any],
        stdin: bytes,
        limits: Limits,
        judge: dict[str, Any] | None,
        native_wall: float | None,
        bare: bool,
    ) -> None:
        self.limits = limits
        output = limits.output_kb << 10
        self.files = [sealed_input(stdin), bounded_output(output), bounded_output(output)]
        self.files += [sealed_input(marshal.dumps(payload)), bounded_output(limits.result_kb << 10)]
        environment = payload.get("environment", {})
        roles: list[dict[str, Any]] = [{"mode": mode, "fds": [0, 1, 2, 3, 4], "environment": environment}]
        if judge is not None:
            program_end, judge_end = socket.socketpair()
            self.files += [program_end.detach(), judge_end.detach(), sealed_input(marshal.dumps(judge))]
            self.files += [os.open(os.devnull, os.O_RDWR), bounded_output(4096)]
            roles[0]["fds"] = [0, 1, 2, 3, 9, 5]
            roles.append({"mode": "judge", "fds": [8, 8, 8, 7, 4, 6], "environment": {}})
        request_limits = limits.as_request()
        if native_wall is not None:
            request_limits |= {"native": True, "wall_seconds": native_wall, "cpu_seconds": native_wall}
        self.request = {"roles": roles, "limits": request_limits}

    async def on(self, zygote: Zygote, group: Any) -> Remains:
        """Run on a zygote and collect what is left."""
        try:
            before = 0
            if group is not None:
                megabytes = self.limits.memory_mb + self.limits.disk_mb + CGROUP_SLACK_MB
                group.limit(megabytes << 20, self.limits.processes + 8)
                before = group.oom_kills()
            wall = self.request["limits"]["wall_seconds"]
            reply = await zygote.run(self.request, self.files, wall + PATIENCE)
            oom = group is not None and group.oom_kills() > before
            return self._remains(reply, oom)
        finally:
            for descriptor in self.files:
                os.close(descriptor)

    def _remains(self, reply: dict[str, Any], oom: bool) -> Remains:
        if "fault" in reply:
            return Remains(fault=reply["fault"])
        program = reply["children"][0]
        fault = next((child["fault"] for child in reply["children"] if child["fault"]), None)
        stdout, stdout_cut = written(self.files[1])
        stderr, stderr_cut = written(self.files[2])
        return Remains(
            status=program["status"],
            why=next((child["why"] for child in reply["children"] if child["why"]), None),
            fault=fault,
            cpu=program["cpu"],
            wall=reply["wall"],
            max_rss_kb=program["max_rss_kb"],
            oom=oom,
            stdout=stdout,
            stderr=stderr,
            stdout_cut=stdout_cut,
            stderr_cut=stderr_cut,
            lines=verdict.parse_lines(written(self.files[4])[0]),
        )


def _stdio_result(remains: Remains, expected: str) -> TestResult:
    result = _run_result(remains)
    if result.outcome is not Outcome.PASSED:
        return TestResult(result.outcome, remains.wall, result.detail or result.stderr[-2000:])
    if verdict.same_output(remains.stdout, expected):
        return TestResult(Outcome.PASSED, remains.wall)
    return TestResult(Outcome.WRONG, remains.wall, f"printed {result.stdout[:200]!r}")


def _run_result(remains: Remains) -> RunResult:
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
        files=_files(remains.lines),
    )


def _files(lines: list[dict[str, Any]]) -> dict[str, bytes]:
    found = {}
    for line in lines:
        pair = line.get("file")
        if isinstance(pair, list) and len(pair) == 2 and all(isinstance(part, str) for part in pair):
            found[pair[0]] = base64.b64decode(pair[1])
    return found


def _native_result(remains: Remains) -> RunResult:
    """The result of a compiled or interpreted program, from the driver's report; the driver is out of its reach."""
    import dataclasses

    base = _run_result(remains)
    compiled = next((line["compile"] for line in remains.lines if "compile" in line), None)
    ran = next((line["run"] for line in remains.lines if "run" in line), None)
    compile_result = None
    if compiled is not None:
        ok = compiled["status"] == 0 and not compiled["why"]
        compile_result = CompileResult(ok, compiled["t"], compiled["status"], compiled["output"], bool(compiled["why"]))
        if not ok:
            return dataclasses.replace(base, outcome=Outcome.ERROR, exit_code=None, detail="it does not compile", compiled=compile_result)
    if ran is None or verdict.ending(remains):
        return dataclasses.replace(base, compiled=compile_result)
    status = ran["status"] if ran["status"] >= 0 else -ran["status"]
    inner = dataclasses.replace(remains, status=status << 8 if ran["status"] >= 0 else status, why=ran["why"], wall=ran["t"])
    return dataclasses.replace(_run_result(inner), compiled=compile_result)


def _make_workdir() -> Path:
    """A directory of this supervisor's, after sweeping those of killed ones."""
    parent = Path(tempfile.gettempdir())
    for old in parent.glob(f"{WORKDIR_PREFIX}*"):
        pid = old.name.removeprefix(WORKDIR_PREFIX).split("-")[0]
        if pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
            shutil.rmtree(old, ignore_errors=True)
    path = Path(tempfile.mkdtemp(prefix=f"{WORKDIR_PREFIX}{os.getpid()}-"))
    path.chmod(0o711)
    (path / "root").mkdir(mode=0o755)
    return path
