"""What each HTTP request means: JSON in, sandbox calls, JSON out. No web framework here."""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import logging
import math
import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, fields, replace
from typing import Any, TypeVar

from upshot.core.errors import UserError, did_you_mean
from upshot.sandbox.limits import Limits
from upshot.sandbox.local.pool import Sandbox
from upshot.sandbox.local.sessions import SessionOver
from upshot.sandbox.local.slots import Busy
from upshot.sandbox.local.zygotes import ZygoteGone
from upshot.sandbox.outcome import Outcome, RunResult, StdioTest, TestResult
from upshot.sandbox.runner import Session

log = logging.getLogger("upshot.sandbox")
Default = TypeVar("Default", float, None)
MAX_SECONDS = 300.0
CEILINGS = {
    "memory_mb": 16_384,
    "disk_mb": 4_096,
    "file_mb": 4_096,
    "files": 1_000_000,
    "open_files": 4_096,
    "processes": 1_024,
    "output_kb": 65_536,
    "result_kb": 16_384,
}
"""The most a request may ask for; a run's disk, output and results are this machine's memory."""
_LIMIT_NAMES = {field.name for field in fields(Limits)}


class SandboxFault(Exception):
    """The sandbox could not run a program; the answer is missing, not zero."""


class Service:
    """The API's verbs on one sandbox."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self.sessions: dict[str, Session] = {}

    def health(self) -> dict[str, Any]:
        """Alive, and behind which walls."""
        sandbox = self.sandbox
        layers = sandbox.describe_layers()
        load = {"slots": sandbox.count, "running": sandbox.running, "waiting": sandbox.waiting}
        return {"status": "healthy", "layers": layers, **load, "sessions": len(self.sessions)}

    async def test_program(self, body: dict[str, Any]) -> dict[str, Any]:
        """Assert tests: {program, tests, max_execution_time} to {results, runtimes, outcomes, details}."""
        tests = _list_of(body, "tests", str)
        results = await self.sandbox.test_program(_text(body, "program"), tests, self._limits(body))
        return _test_answer(results, bool(body.get("allow_missing")))

    async def test_stdio(self, body: dict[str, Any]) -> dict[str, Any]:
        """stdin/stdout tests: {program, tests: [{input, output}], max_execution_time}, answered like test_program."""
        tests = [StdioTest(_text(test, "input"), _text(test, "output")) for test in _list_of(body, "tests", dict)]
        results = await self.sandbox.test_stdio(_text(body, "program"), tests, self._limits(body))
        return _test_answer(results, bool(body.get("allow_missing")))

    async def run_code(self, body: dict[str, Any]) -> dict[str, Any]:
        """SandboxFusion's run_code: {code, language, stdin, run_timeout, compile_timeout, files, fetch_files}."""
        memory = body.get("memory_limit_MB")
        if isinstance(memory, int | float) and memory <= 0:  # SandboxFusion's word for none
            memory = None
        limits = self._limits(body, "run_timeout", {} if memory is None else {"memory_mb": memory})
        return fusion_answer(await self._run(body, limits))

    async def submit(self, body: dict[str, Any]) -> dict[str, Any]:
        """SandboxFusion's submit for tests sent along: asserts or stdio cases in config.provided_data."""
        config = _object(body, "config")
        data = _object(config, "provided_data") or body
        code = extract_code(_text(body, "completion"))
        limits = self._limits(config, "run_timeout")
        cases = data.get("test_cases") or data.get("test")
        if isinstance(cases, list):
            stdio = [_fusion_case(case) for case in cases]
            results = await self.sandbox.test_stdio(code, stdio, limits)
        else:
            results = await self.sandbox.test_program(code, _list_of(data, "tests", str), limits)
        faults = [result.detail for result in results if result.outcome is Outcome.SANDBOX_FAULT]
        if faults:
            raise SandboxFault(faults[0])
        tests = [
            {"passed": result.passed, "exec_info": {"status": result.outcome, "message": result.detail}}
            for result in results
        ]
        accepted = bool(results) and all(result.passed for result in results)
        return {"id": body.get("id"), "accepted": accepted, "extracted_code": code, "full_code": code, "tests": tests}

    async def batch(self, body: dict[str, Any]) -> AsyncIterator[bytes]:
        """Many requests in one: a line of JSON for each as it finishes, with its index."""
        items = _list_of(body, "items", dict)
        verbs: dict[str, Callable[[dict[str, Any]], Any]] = {
            "test_program": self.test_program,
            "test_program_stdio": self.test_stdio,
            "run_code": self.run_code,
        }
        for item in items:
            if item.get("kind") not in list(verbs):
                raise UserError(f"unknown kind {item.get('kind')!r} in items; known: {', '.join(verbs)}")
        return self._stream(items, verbs)

    async def _stream(
        self, items: list[dict[str, Any]], verbs: dict[str, Callable[[dict[str, Any]], Any]]
    ) -> AsyncIterator[bytes]:
        gate = asyncio.Semaphore(2 * self.sandbox.count)

        async def one(index: int, item: dict[str, Any]) -> bytes:
            async with gate:
                answer = await self._answer_item(verbs[item["kind"]], {**item, "allow_missing": True})
            return json.dumps({"index": index, "id": item.get("id"), **answer}).encode() + b"\n"

        tasks = [asyncio.create_task(one(index, item)) for index, item in enumerate(items)]
        try:
            for finished in asyncio.as_completed(tasks):
                yield await finished
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _answer_item(self, verb: Callable[[dict[str, Any]], Any], item: dict[str, Any]) -> dict[str, Any]:
        while True:
            try:
                return await verb(item)
            except Busy as busy:
                await asyncio.sleep(min(busy.retry_after, 1.0))
            except UserError as error:
                return {"error": str(error)}
            except SandboxFault as fault:
                return {"error": f"sandbox_fault: {fault}"}
            except Exception as error:  # one item's trouble is not the others'
                log.exception("an item of a batch failed")
                return {"error": f"internal error: {type(error).__name__}"}

    async def open_session(self, body: dict[str, Any]) -> dict[str, Any]:
        """A stateful Python session; {session_id}."""
        try:
            session = await self.sandbox.session(self._limits(body, "run_timeout"))
        except (ZygoteGone, SessionOver, OSError) as error:
            raise SandboxFault(str(error)) from error
        name = base64.b32encode(secrets.token_bytes(15)).decode().lower()
        self.sessions = {key: kept for key, kept in self.sessions.items() if getattr(kept, "over", None) is None}
        self.sessions[name] = session
        return {"session_id": name}

    async def turn(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        """One turn of a session."""
        code, seconds = _text(body, "code"), _seconds(body, "run_timeout", None)
        session = self.sessions.get(name)
        if session is None:
            gone = "the session has ended: it was closed, evicted or never opened"
            return run_answer(RunResult(Outcome.ERROR, None, detail=gone))
        return run_answer(await session.turn(code, seconds))

    async def close_session(self, name: str) -> dict[str, Any]:
        """End a session."""
        session = self.sessions.pop(name, None)
        if session is not None:
            await session.aclose()
        return {"closed": session is not None}

    async def run(self, body: dict[str, Any]) -> dict[str, Any]:
        """Our own form of run_code: all fields of a RunResult."""
        return run_answer(await self._run(body, self._limits(body)))

    async def _run(self, body: dict[str, Any], limits: Limits) -> RunResult:
        return await self.sandbox.run(
            _text(body, "code"),
            _text(body, "language", "python"),
            stdin=_text(body, "stdin", ""),
            files=_decode_files(_object(body, "files")),
            limits=limits,
            fetch=_list_of(body, "fetch_files", str) if body.get("fetch_files") else (),
            compile_seconds=_seconds(body, "compile_timeout", 20.0),
        )

    def _limits(
        self, body: dict[str, Any], name: str = "max_execution_time", more: dict[str, Any] | None = None
    ) -> Limits:
        """The limits a request asks for, none above this server's."""
        asked = _object(body, "limits") | (more or {})
        for key in asked:
            if key not in _LIMIT_NAMES:
                raise UserError(f"unknown limit '{key}'; {did_you_mean(key, _LIMIT_NAMES)}")
        limits = replace(self.sandbox.limits, **asked)
        for key, most in CEILINGS.items():
            if getattr(limits, key) > most:
                raise UserError(f"limit {key} is {getattr(limits, key)}; this server allows at most {most}")
        limits = limits.with_cpu(_seconds(body, name, None))
        if limits.cpu_seconds > MAX_SECONDS or limits.wall > 4 * MAX_SECONDS:
            raise UserError(
                f"limits cpu_seconds, wall_seconds are {limits.cpu_seconds}, {limits.wall_seconds}; this server allows "
                f"at most {MAX_SECONDS:g} s of CPU and {4 * MAX_SECONDS:g} s in all"
            )
        return limits


def _seconds(body: dict[str, Any], name: str, default: Default) -> float | Default:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise UserError(f"{name} is {value!r}; it must be a number of seconds above 0")
    if not value <= MAX_SECONDS:
        raise UserError(f"{name} is {value}; this server allows at most {MAX_SECONDS:g} s")
    return float(value)


def _object(body: dict[str, Any], name: str) -> dict[str, Any]:
    value = body.get(name) or {}
    if not isinstance(value, dict):
        raise UserError(f"field '{name}' must be an object")
    return value


def _text(body: dict[str, Any], name: str, default: str | None = None) -> str:
    value = body.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, str):
        raise UserError(
            f"field '{name}' is {'missing' if value is None else type(value).__name__}; it must be a string"
        )
    return value


def _list_of(body: dict[str, Any], name: str, kind: type) -> list[Any]:
    value = body.get(name)
    if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
        raise UserError(f"field '{name}' must be a list of {'strings' if kind is str else 'objects'}")
    return value


def _decode_files(files: dict[str, Any]) -> dict[str, bytes]:
    try:
        return {name: base64.b64decode(content or "", validate=True) for name, content in files.items()}
    except (binascii.Error, TypeError, ValueError) as error:
        raise UserError(f"field 'files' holds something that is not base64: {error}") from error


def _test_answer(results: list[TestResult], allow_missing: bool) -> dict[str, Any]:
    fault = next((result for result in results if result.outcome is Outcome.SANDBOX_FAULT), None)
    if fault is not None and not allow_missing:
        raise SandboxFault(fault.detail)
    return {
        "results": [None if result.value is None else int(result.value) for result in results],
        "runtimes": [_seconds_taken(result) for result in results],
        "outcomes": [result.outcome.value for result in results],
        "details": [result.detail for result in results],
    }


def _seconds_taken(result: TestResult) -> float:
    """Of a test that passed, else -1; the program itself may have measured them."""
    seconds = result.seconds if result.passed else None
    return seconds if seconds is not None and math.isfinite(seconds) else -1


def run_answer(result: RunResult) -> dict[str, Any]:
    """A RunResult as JSON."""
    answer = asdict(result)
    answer["files"] = {name: base64.b64encode(data).decode() for name, data in result.files.items()}
    return answer


_FUSION_STATUS = {Outcome.PASSED: "Finished", Outcome.TIMEOUT: "TimeLimitExceeded"}


def fusion_answer(result: RunResult) -> dict[str, Any]:
    """A RunResult in SandboxFusion's fields, with ours beside them."""
    if result.outcome is Outcome.SANDBOX_FAULT:
        raise SandboxFault(result.detail)
    compiled = None
    if result.compiled is not None:
        late = result.compiled.timed_out
        compiled = {
            "status": "TimeLimitExceeded" if late else "Finished",
            "execution_time": result.compiled.seconds,
            "return_code": result.compiled.exit_code,
            "stdout": "",
            "stderr": result.compiled.output,
        }
    ran = None
    if result.compiled is None or result.compiled.ok:
        ended = result.outcome in (Outcome.PASSED, Outcome.ERROR, Outcome.OUTPUT_LIMIT) and result.exit_code is not None
        ran = {
            "status": "Finished" if ended else _FUSION_STATUS.get(result.outcome, "Error"),
            "execution_time": result.wall_seconds,
            "return_code": result.exit_code,
            "stdout": result.stdout,
            "stderr": result.stderr,
        }
    return {
        "status": "Success" if result.outcome is Outcome.PASSED else "Failed",
        "message": result.detail,
        "compile_result": compiled,
        "run_result": ran,
        "executor_pod_name": None,
        "files": {name: base64.b64encode(data).decode() for name, data in result.files.items()},
        "outcome": result.outcome.value,
        "stdout_cut": result.stdout_cut,
        "stderr_cut": result.stderr_cut,
    }


def _fusion_case(case: Any) -> StdioTest:
    if not isinstance(case, dict):
        raise UserError("each of test_cases must be an object with input and output")
    given, wanted = case.get("input"), case.get("output")
    given = given.get("stdin") if isinstance(given, dict) else given
    wanted = wanted.get("stdout") if isinstance(wanted, dict) else wanted
    return StdioTest(_text({"input": given}, "input"), _text({"output": wanted}, "output"))


def extract_code(completion: str) -> str:
    """The last fenced block of a model's answer, or all of it where there is none."""
    parts = completion.split("```")
    if len(parts) < 3:
        return completion
    block = parts[-2] if len(parts) % 2 else parts[-1]
    first, _, rest = block.partition("\n")
    return rest if first.strip().isalnum() or not first.strip() else block
