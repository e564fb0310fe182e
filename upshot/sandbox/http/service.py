"""Executes each HTTP request: turns its body into sandbox calls, and their results into JSON.

Three dialects on one sandbox: the compatible test API (`/test_program`: 0 or 1 per test), SandboxFusion's `/run_code`,
and our own `/run` and `/sessions`. No web framework here: `server.py` has routes and status codes, `bodies.py` the
fields.
"""

from __future__ import annotations

import base64
import logging
import math
import secrets
from dataclasses import asdict
from typing import Any

from upshot.core.errors import UserError
from upshot.sandbox.http.bodies import LimitedBody, ProgramBody, StdioCase, TestBody, read_body
from upshot.sandbox.local.pool import Sandbox
from upshot.sandbox.local.sessions import SessionOver
from upshot.sandbox.local.zygotes import ZygoteGone
from upshot.sandbox.outcome import Outcome, RunResult, StdioTest, TestResult
from upshot.sandbox.runner import Session

log = logging.getLogger("upshot.sandbox")


class SandboxFault(Exception):
    """The sandbox could not run a program; the answer is missing, not zero."""


def describe_failure(error: Exception) -> tuple[int, str]:
    """The status and the message for a failed request."""
    if isinstance(error, SandboxFault):
        return 503, f"sandbox_fault: {error}"
    if isinstance(error, UserError):
        return 400, str(error)
    log.error("a request failed", exc_info=error)
    return 500, f"internal error: {type(error).__name__}"


class Service:
    """The API's verbs on one sandbox."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self.sessions: dict[str, Session] = {}

    def health(self) -> dict[str, Any]:
        """That the server is alive, and its layers of isolation."""
        sandbox = self.sandbox
        load = {"slots": sandbox.count, "running": sandbox.running, "waiting": sandbox.waiting}
        return {"status": "healthy", "layers": sandbox.describe_layers(), **load, "sessions": len(self.sessions)}

    async def test_program(self, data: Any) -> dict[str, Any]:
        """Assert tests: {program, tests, max_execution_time} to {results, runtimes, outcomes, details}."""
        body = read_body(TestBody[str], data)
        limits = body.limits_from(self.sandbox.limits)
        results = await self.sandbox.test_program(body.program, body.tests, limits, body.given, body.language)
        return answer_tests(results, bool(body.allow_missing))

    async def test_stdio(self, data: Any) -> dict[str, Any]:
        """stdin/stdout tests: {program, tests: [{input, output}], max_execution_time}, answered like test_program."""
        body = read_body(TestBody[StdioCase], data)
        tests = [StdioTest(case.input, case.output) for case in body.tests]
        limits = body.limits_from(self.sandbox.limits)
        results = await self.sandbox.test_stdio(body.program, tests, limits, body.language)
        return answer_tests(results, bool(body.allow_missing))

    async def run(self, data: Any) -> dict[str, Any]:
        """Our own version of run_code: all fields of a RunResult."""
        return answer_run(await self._run(read_body(ProgramBody, data)))

    async def run_code(self, data: Any) -> dict[str, Any]:
        """SandboxFusion's run_code: {code, language, stdin, run_timeout, compile_timeout, files, fetch_files}."""
        return answer_fusion(await self._run(read_body(ProgramBody, data)))

    async def _run(self, body: ProgramBody) -> RunResult:
        memory = body.memory_limit_MB
        unlimited = memory is None or (isinstance(memory, int | float) and memory <= 0)  # as in SandboxFusion
        return await self.sandbox.run(
            body.code,
            body.language,
            stdin=body.stdin,
            files=body.files,
            limits=body.limits_from(self.sandbox.limits, **({} if unlimited else {"memory_mb": memory})),
            fetch=body.fetch_files,
            compile_seconds=body.compile_timeout,
        )

    async def open_session(self, data: Any) -> dict[str, Any]:
        """A stateful Python session; {session_id}."""
        limits = read_body(LimitedBody, data).limits_from(self.sandbox.limits)
        try:
            session = await self.sandbox.session(limits)
        except (ZygoteGone, SessionOver, OSError) as error:
            raise SandboxFault(str(error)) from error
        name = base64.b32encode(secrets.token_bytes(15)).decode().lower()
        self.sessions = {key: kept for key, kept in self.sessions.items() if getattr(kept, "over", None) is None}
        self.sessions[name] = session
        return {"session_id": name}

    async def turn(self, name: str, data: Any) -> dict[str, Any]:
        """One turn of a session."""
        body = read_body(ProgramBody, data)
        session = self.sessions.get(name)
        if session is None:
            gone = "the session has ended: it was closed, evicted or never opened"
            return answer_run(RunResult(Outcome.ERROR, None, detail=gone))
        return answer_run(await session.turn(body.code, body.run_timeout))

    async def close_session(self, name: str) -> dict[str, Any]:
        """End a session."""
        if (session := self.sessions.pop(name, None)) is not None:
            await session.aclose()
        return {"closed": session is not None}


def answer_tests(results: list[TestResult], allow_missing: bool) -> dict[str, Any]:
    """Test results in the compatible API's fields, with ours beside them."""
    fault = next((result for result in results if result.outcome is Outcome.SANDBOX_FAULT), None)
    if fault is not None and not allow_missing:
        raise SandboxFault(fault.detail)
    return {
        "results": [None if result.value is None else int(result.value) for result in results],
        # The time of a test that passed, else -1; the program itself may have measured it.
        "runtimes": [s if r.passed and (s := r.seconds) is not None and math.isfinite(s) else -1 for r in results],
        "outcomes": [result.outcome.value for result in results],
        "details": [result.detail for result in results],
    }


def answer_run(result: RunResult) -> dict[str, Any]:
    """A RunResult as JSON."""
    return {**asdict(result), "files": _encode_files(result)}


def answer_fusion(result: RunResult) -> dict[str, Any]:
    """A RunResult in SandboxFusion's fields, with ours beside them."""
    if result.outcome is Outcome.SANDBOX_FAULT:
        raise SandboxFault(result.detail)
    compiled = ran = None
    if (step := result.compiled) is not None:
        status = "TimeLimitExceeded" if step.timed_out else "Finished"
        compiled = _fusion_step(status, step.seconds, step.exit_code, "", step.output)
    if step is None or step.ok:
        ended = result.outcome in (Outcome.PASSED, Outcome.ERROR, Outcome.OUTPUT_LIMIT) and result.exit_code is not None
        late = result.outcome is Outcome.TIMEOUT
        status = "Finished" if ended else "TimeLimitExceeded" if late else "Error"
        ran = _fusion_step(status, result.wall_seconds, result.exit_code, result.stdout, result.stderr)
    return {
        "status": "Success" if result.outcome is Outcome.PASSED else "Failed",
        "message": result.detail,
        "compile_result": compiled,
        "run_result": ran,
        "executor_pod_name": None,
        "files": _encode_files(result),
        "outcome": result.outcome.value,
        "stdout_cut": result.stdout_cut,
        "stderr_cut": result.stderr_cut,
    }


def _fusion_step(status: str, seconds: float, code: int | None, stdout: str, stderr: str) -> dict[str, Any]:
    named = {"status": status, "execution_time": seconds, "return_code": code}
    return {**named, "stdout": stdout, "stderr": stderr}


def _encode_files(result: RunResult) -> dict[str, str]:
    return {name: base64.b64encode(data).decode() for name, data in result.files.items()}
