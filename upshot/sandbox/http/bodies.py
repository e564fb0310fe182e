"""The bodies of HTTP requests: what a client of the sandbox may send, checked by pydantic, refused in one line.

Null counts as absent, and unknown fields are ignored, because SandboxFusion's clients send more than is used. Types are
strict: a number in quotes is a mistake, not a number.
"""

from __future__ import annotations

import base64
from dataclasses import fields, replace
from typing import Annotated, Any, Generic, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, ValidationError, model_validator

from upshot.core.errors import UserError, did_you_mean
from upshot.sandbox.limits import Limits

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
"""The most that a request may ask for, because a run's disk, output and results are in this machine's memory."""
_LIMIT_NAMES = {field.name for field in fields(Limits)}


def _decode_file(content: Any) -> bytes:
    try:
        return base64.b64decode(content or "", validate=True)
    except (TypeError, ValueError) as error:
        raise ValueError(f"field 'files' holds something that is not base64: {error}") from error


Seconds = Annotated[float, Field(gt=0, le=MAX_SECONDS, allow_inf_nan=False)]
FileContent = Annotated[bytes, PlainValidator(_decode_file)]


class RequestBody(BaseModel):
    """A JSON object: null counts as absent, and unknown fields belong to other servers' dialects."""

    model_config = ConfigDict(strict=True, extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        return {name: value for name, value in data.items() if value is not None} if isinstance(data, dict) else data


class LimitedBody(RequestBody):
    """A body that may set its own limits."""

    limits: dict[str, Any] = {}
    max_execution_time: Seconds | None = None
    """CPU seconds, as the compatible API calls them …"""
    run_timeout: Seconds | None = None
    """… and as SandboxFusion does."""

    def limits_from(self, defaults: Limits, **more: Any) -> Limits:
        """The requested limits, with the server's defaults for the rest; none may exceed its maximum."""
        asked = self.limits | more
        for name in asked:
            if name not in _LIMIT_NAMES:
                raise UserError(f"unknown limit '{name}'; {did_you_mean(name, _LIMIT_NAMES)}")
        limits = replace(defaults, **asked)
        for name, most in CEILINGS.items():
            if getattr(limits, name) > most:
                raise UserError(f"limit {name} is {getattr(limits, name)}; this server allows at most {most}")
        limits = limits.with_cpu(self.max_execution_time or self.run_timeout)
        if limits.cpu_seconds > MAX_SECONDS or limits.wall > 4 * MAX_SECONDS:
            raise UserError(
                f"limits cpu_seconds, wall_seconds are {limits.cpu_seconds}, {limits.wall_seconds}; this server allows "
                f"at most {MAX_SECONDS:g} s of CPU and {4 * MAX_SECONDS:g} s in all"
            )
        return limits


Test = TypeVar("Test")


class StdioCase(RequestBody):
    """One stdin/stdout test; SandboxFusion writes {"stdin": …} and {"stdout": …} around the texts."""

    input: Annotated[str, BeforeValidator(lambda text: text.get("stdin") if isinstance(text, dict) else text)]
    output: Annotated[str, BeforeValidator(lambda text: text.get("stdout") if isinstance(text, dict) else text)]


class TestBody(LimitedBody, Generic[Test]):
    """POST /test_program with texts of asserts, /test_program_stdio with cases."""

    __test__ = False

    program: str
    tests: list[Test]
    given: str = ""
    """The row's own code: helpers of its prompt, which the program must not change."""
    language: str = "python"
    allow_missing: Any = False
    """Whether a fault may be answered with null; else the whole request fails with 503."""


class ProgramBody(LimitedBody):
    """POST /run and /run_code; for a turn of a session, only the code and its CPU seconds."""

    code: str
    language: str = "python"
    stdin: str = ""
    files: dict[str, FileContent] = {}
    fetch_files: list[str] = []
    compile_timeout: Seconds = 20.0
    memory_limit_MB: Any = None


Body = TypeVar("Body", bound=RequestBody)


def read_body(kind: type[Body], data: Any) -> Body:
    """A checked body, or a `UserError` of one line that names the invalid field."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    name = ".".join(map(str, first["loc"]))
    if first["type"] == "value_error":
        raise UserError(first["msg"].removeprefix("Value error, "))
    if not name:
        raise UserError("the request must be a JSON object")
    if first["type"] == "missing":
        raise UserError(f"field '{name}' is missing")
    is_object = first["type"] in ("dict_type", "model_type")
    wanted = "an object" if is_object else first["msg"].removeprefix("Input should be ")
    raise UserError(f"field '{name}' is {repr(first['input'])[:60]}; it must be {wanted}")
