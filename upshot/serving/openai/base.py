"""Shared by all servers of OpenAI's API: reading requests, checking names, errors in OpenAI's format, choices.

A request's size is checked before it is tokenised, and a long one is read in a thread: no client's request keeps others
waiting. Each server has its own source of replies: `server.py` has an engine, `conversations.py` the player of a
conversation.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse
from starlette.routing import Route

from upshot.core.errors import UserError
from upshot.core.http_server import CalmEnd, ClientGone, RequestGate, while_connected
from upshot.models.base import ModelCallError
from upshot.models.tokens import TokenPieces
from upshot.serving.openai.message import Dialect

MAX_BYTES = 16 << 20
"""Largest request in bytes: a million ids of context, with every character escaped."""
LONG_BYTES = 128 << 10
"""Larger requests are read outside the event loop, because that takes longer than a step of the engine."""
MOST_LONG = 16
"""Long requests that may wait to be read."""
READ_S = 60.0
"""Time limit for reading a request, in seconds."""
STATUS = {"too_long": 400, "rate_limited": 429, "aborted": 499}
Asked = TypeVar("Asked")


class OtherModel(Exception):
    """A request for a model that is not served here."""


def failure(status: int, message: str, kind: str = "") -> JSONResponse:
    """An error in OpenAI's format."""
    kind = kind or ("authentication_error" if status == 401 else "invalid_request_error")
    headers = {"Retry-After": "1"} if status == 429 else {}
    body = {"error": {"message": message, "type": kind, "param": None, "code": status}}
    return JSONResponse(body, status_code=status, headers=headers)


def event(outer: dict[str, Any], choice: dict[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json.dumps({**outer, 'choices': [choice]}, ensure_ascii=False)}\n\n"


class ApiServer:
    """Requests in and errors out, for one model under one name."""

    served = ""
    """The served routes, for the message to a client that asks for another."""

    def __init__(self, name: str, tokenizer: Any, api_key: str = "", any_name: bool = False, parser: str = "") -> None:
        self.name = name
        self.api_key = api_key
        self.any_name = any_name
        """Whether requests that name another model are answered, too."""
        self.pieces = TokenPieces(tokenizer)
        self.dialect = Dialect(tokenizer, parser or "auto")
        self.counts = {"requests": 0, "refused": 0, "failed": 0, "disconnected": 0}
        self._long = 0
        """The number of long requests that are being read or wait for it."""
        self._reader = ThreadPoolExecutor(1, "upshot-requests")
        gate = Middleware(RequestGate, key=self.api_key, max_bytes=MAX_BYTES, read_s=READ_S, refuse=failure)
        kinds: tuple[type[Exception], ...] = (UserError, ModelCallError, OtherModel, ClientGone, HTTPException)
        handlers: Any = dict.fromkeys(kinds, self._answer_error)
        self.app = Starlette(routes=self._routes(), middleware=[Middleware(CalmEnd), gate], exception_handlers=handlers)

    def _routes(self) -> Sequence[Route]:
        raise NotImplementedError

    async def _answer_error(self, http: HttpRequest, error: Exception) -> JSONResponse:
        """Errors in OpenAI's format."""
        if isinstance(error, HTTPException):  # no such path, or not with that method
            place = f"{http.method} {http.url.path[:200]}"
            absent = f"{place} is not served here (no embeddings, responses or audio): {self.served}"
            return failure(error.status_code, error.detail if error.status_code == 401 else absent)
        if isinstance(error, OtherModel):
            return failure(404, str(error))
        if isinstance(error, ClientGone):
            self.counts["disconnected"] += 1
            return failure(499, "the client went away", "disconnected")
        if isinstance(error, ModelCallError):
            status = STATUS.get(error.reason, 500)
            self.counts["refused" if status == 429 else "failed"] += 1
            return failure(status, str(error), error.reason)
        return failure(400, str(error))

    def _check_name(self, name: str) -> None:
        """Refuse a request for another model; a request that names none means the served one."""
        if name not in ("", self.name) and not self.any_name:
            raise OtherModel(f"no model '{name}' here, only '{self.name}' (upshot serve --any-name takes any name)")

    def _entry(self) -> dict[str, Any]:
        """The served model, as an entry of a list of models."""
        return {"id": self.name, "object": "model", "created": 0, "owned_by": "upshot"}

    async def _read(self, http: HttpRequest, read: Callable[[bytes], Asked]) -> Asked:
        """The request that `read` makes from the body; a long one is read only while its client waits."""
        self.counts["requests"] += 1
        raw = b"".join([piece async for piece in http.stream()])
        if len(raw) <= LONG_BYTES:
            return read(raw)
        if self._long >= MOST_LONG:
            raise ModelCallError("rate_limited", f"{self._long} long requests are already waiting to be read")
        self._long += 1
        try:
            reading: Awaitable[Asked] = asyncio.get_running_loop().run_in_executor(self._reader, read, raw)
            return await while_connected(http.receive, reading)
        finally:
            self._long -= 1
