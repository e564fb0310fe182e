"""Clients over HTTP: our server, the compatible assert API, SandboxFusion. A failed request is a fault, not a zero."""

from __future__ import annotations

import base64
import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from upshot.core.errors import UserError
from upshot.core.http_client import AttemptError, HttpClient, Repeat, RetryPolicy
from upshot.sandbox.inside.cases import standalone
from upshot.sandbox.limits import Limits
from upshot.sandbox.local.languages import canonical
from upshot.sandbox.local.script_runner import ScriptRunner
from upshot.sandbox.outcome import CompileResult, Outcome, RunResult, StdioTest, TestResult
from upshot.sandbox.runner import CodeRunner, ProgramJob, Session

RETRY = RetryPolicy(retries=5, backoff_s=0.1)
PATIENCE_S = 120.0
"""Seconds a request may wait in the server's queue beyond its own limits."""
ReadRun = Callable[[dict[str, Any]], RunResult]
REFUSED = (400, 401, 403, 404, 413, 415, 422)


class Unreachable(Exception):
    """The server did not answer, or answered that it could not run the program."""


FAULTS = (Unreachable, KeyError, TypeError, ValueError, AttributeError)
"""The exceptions for no answer, and for an answer of the wrong shape."""


class Connection(HttpClient):
    """Requests to a server: after a full queue or a broken connection they are retried."""

    def __init__(self, url: str, api_key: str | None) -> None:
        super().__init__(url, headers={"Authorization": f"Bearer {api_key}"} if api_key else {}, retry=RETRY)

    async def ask(
        self, method: str, path: str, body: dict[str, Any] | None, seconds: float, repeat: Repeat = "any"
    ) -> dict[str, Any]:
        """One answer; raises Unreachable after the last attempt, UserError for a request the server refuses."""
        try:
            return (await self.request(method, path, body, timeout_s=seconds + PATIENCE_S, repeat=repeat))[0]
        except AttemptError as error:
            where = f"{self.url}{path}"
            if error.status in REFUSED:
                raise UserError(f"{where} refused the request: {error.status}: {error.detail}") from error
            raise Unreachable(f"{where}: {error.reason}: {error.detail}") from error

    async def ask_run(
        self, path: str, body: dict[str, Any], seconds: float, read: ReadRun, repeat: Repeat = "any"
    ) -> RunResult:
        """The server's answer about a run; no answer is a fault."""
        try:
            return read(await self.ask("POST", path, body, seconds, repeat))
        except FAULTS as error:
            return RunResult(Outcome.SANDBOX_FAULT, None, detail=str(error))


class HttpRunner(CodeRunner):
    """A runner behind a URL."""

    def __init__(self, url: str, api_key: str | None, limits: Limits | None) -> None:
        self.connection = Connection(url, api_key)
        self.limits = limits or Limits()

    async def aclose(self) -> None:
        await self.connection.aclose()


class CompatibleRunner(HttpRunner):
    """Any server with /test_program and /test_program_stdio as FACTS describes them: 0 or 1 per test."""

    def _body(self, program: str, tests: list[Any], limits: Limits, given: str, language: str) -> dict[str, Any]:
        if canonical(language) != "python":
            raise UserError(f"language '{language}': the compatible code API runs only Python")
        texts = [standalone(test) if isinstance(test, str) else test for test in tests]
        return {"program": program, "tests": texts, "max_execution_time": limits.cpu_seconds}

    async def _test(self, program: str, tests: Sequence[str], given: str, limits: Limits) -> list[TestResult]:
        return await self._post("/test_program", program, list(tests), limits, given)

    async def _test_stdio(
        self, program: str, tests: Sequence[StdioTest], language: str, limits: Limits
    ) -> list[TestResult]:
        cases = [asdict(test) for test in tests]
        return await self._post("/test_program_stdio", program, cases, limits, language=language)

    async def _post(
        self, path: str, program: str, tests: list[Any], limits: Limits, given: str = "", language: str = "python"
    ) -> list[TestResult]:
        try:
            seconds = 3 * limits.wall * max(1, len(tests))
            body = self._body(program, tests, limits, given, language)
            results = self._read(await self.connection.ask("POST", path, body, seconds))
            if len(results) != len(tests):
                raise ValueError(f"{len(results)} results for {len(tests)} tests")
            return results
        except FAULTS as error:
            return [TestResult(Outcome.SANDBOX_FAULT, None, str(error)) for _ in tests]

    def _read(self, answer: dict[str, Any]) -> list[TestResult]:
        results, runtimes = answer["results"], answer.get("runtimes") or [-1] * len(answer["results"])
        outcomes = {1: Outcome.PASSED, None: Outcome.UNCONFIRMED}
        return [
            TestResult(outcomes.get(value, Outcome.WRONG), None if seconds < 0 else float(seconds))
            for value, seconds in zip(results, runtimes, strict=True)
        ]

    async def _run(self, job: ProgramJob) -> RunResult:
        raise UserError(
            "the compatible code API only runs tests; use an Upshot or SandboxFusion server to run programs"
        )


class UpshotRunner(CompatibleRunner):
    """Our own server: every outcome, runs, sessions."""

    def _body(self, program: str, tests: list[Any], limits: Limits, given: str, language: str) -> dict[str, Any]:
        body = {"program": program, "tests": tests, "limits": asdict(limits), "allow_missing": True}
        more = {"given": given, "language": "" if canonical(language) == "python" else language}
        return body | {name: text for name, text in more.items() if text}

    async def _test_text(self, program: str, tests: Sequence[str], language: str, limits: Limits) -> list[TestResult]:
        return await self._post("/test_program", program, list(tests), limits, language=language)

    def _read(self, answer: dict[str, Any]) -> list[TestResult]:
        rows = zip(*(answer[name] for name in ("outcomes", "runtimes", "details")), strict=True)
        return [TestResult(Outcome(name), None if seconds < 0 else seconds, detail) for name, seconds, detail in rows]

    async def _run(self, job: ProgramJob) -> RunResult:
        body = {**_describe(job), "limits": asdict(job.limits)}
        return await self.connection.ask_run("/run", body, job.limits.wall + 30, read_run)

    async def session(self, limits: Limits | None = None) -> Session:
        limits = limits or self.limits
        answer = await self.connection.ask("POST", "/sessions", {"limits": asdict(limits)}, 60)
        return RemoteSession(self.connection, answer["session_id"], limits)


class RemoteSession(Session):
    """A session on our server."""

    def __init__(self, connection: Connection, name: str, limits: Limits) -> None:
        self.connection = connection
        self.name = name
        self.limits = limits

    async def turn(self, code: str, cpu_seconds: float | None = None) -> RunResult:
        body, seconds = {"code": code, "run_timeout": cpu_seconds}, self.limits.with_cpu(cpu_seconds).wall
        # A turn changes the session, so it is repeated only if the server cannot have started it.
        return await self.connection.ask_run(f"/sessions/{self.name}", body, seconds, read_run, repeat="unbegun")

    async def aclose(self) -> None:
        # If the server does not answer now, it ends the session itself once it is idle.
        with contextlib.suppress(Unreachable):
            await self.connection.ask("DELETE", f"/sessions/{self.name}", None, 30)


def _describe(job: ProgramJob) -> dict[str, Any]:
    """A job without its limits, in the fields that our server and SandboxFusion share."""
    return {
        "code": job.code,
        "language": job.language,
        "stdin": job.stdin,
        "compile_timeout": job.compile_seconds,
        "files": {name: base64.b64encode(data).decode() for name, data in job.files.items()},
        "fetch_files": list(job.fetch),
    }


def read_run(answer: dict[str, Any]) -> RunResult:
    """A RunResult from our server's JSON."""
    compiled = CompileResult(**answer["compiled"]) if answer.get("compiled") else None
    files = {name: base64.b64decode(data) for name, data in answer["files"].items()}
    return RunResult(**{**answer, "outcome": Outcome(answer["outcome"]), "compiled": compiled, "files": files})


class FusionRunner(HttpRunner, ScriptRunner):
    """A SandboxFusion server, through run_code."""

    async def _run(self, job: ProgramJob) -> RunResult:
        limits = job.limits
        body = {**_describe(job), "run_timeout": limits.cpu_seconds, "memory_limit_MB": limits.memory_mb}
        read = functools.partial(_read_fusion, limits=limits)
        return await self.connection.ask_run("/run_code", body, limits.wall + 30, read)


def _read_fusion(answer: dict[str, Any], limits: Limits) -> RunResult:
    if answer["status"] == "SandboxError":
        return RunResult(Outcome.SANDBOX_FAULT, None, detail=str(answer.get("message")))
    compiled = None
    if answer.get("compile_result"):
        step = answer["compile_result"]
        ok = step["status"] == "Finished" and step.get("return_code") == 0
        output = (step.get("stdout") or "") + (step.get("stderr") or "")
        seconds = float(step.get("execution_time") or 0.0)
        compiled = CompileResult(ok, seconds, step.get("return_code"), output, step["status"] == "TimeLimitExceeded")
    ran = answer.get("run_result")
    if ran is None:
        return RunResult(Outcome.ERROR, None, detail="it does not compile", compiled=compiled)
    code = ran.get("return_code")
    outcome = Outcome.PASSED if ran["status"] == "Finished" and code == 0 else Outcome.ERROR
    if ran["status"] == "TimeLimitExceeded":
        outcome = Outcome.TIMEOUT
    elif "MemoryError" in (ran.get("stderr") or "")[-200:]:
        outcome = Outcome.OUT_OF_MEMORY
    elif answer.get("outcome"):  # our own server reports more
        outcome = Outcome(answer["outcome"])
    out, err = ran.get("stdout") or "", ran.get("stderr") or ""
    files = {name: base64.b64decode(data) for name, data in (answer.get("files") or {}).items()}
    cut = bool(answer.get("stdout_cut")) or len(out) >= limits.output_kb << 10
    seconds = float(ran.get("execution_time") or 0.0)
    return RunResult(outcome, code, out, err, cut, wall_seconds=seconds, compiled=compiled, files=files)
