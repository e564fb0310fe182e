"""Who may call our servers, and how an aborted request ends: the same rules for all of them.

With a key, requests must send it. Without one, the server listens on loopback, for programs on this machine only.
A page in a browser can reach loopback too, so a request must name a loopback host (a page that rebinds its own name to
127.0.0.1 sends that name) and declare its body as JSON (without permission, a page of another origin can send only
plain text or forms).
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from upshot.core.errors import UserError

Result = TypeVar("Result")
OPEN_PATH = "/health"
"""Answered without a key."""
HALF_BODIES = 16
"""Memory for bodies that are still arriving, in bodies of the maximum size."""
LINGER_S = 10.0
"""How long the rest of a refused body is read and discarded, so that the client receives the refusal."""


def is_loopback(host: str) -> bool:
    """Whether a host name or address is this machine's own."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def demand_key(host: str, key: str | None, way_out: str, option: str = "--host") -> None:
    """Refuse to listen beyond loopback without a key; `way_out` says how to set one, `option` where the host is set."""
    if not key and not is_loopback(host):
        raise UserError(f"{option} {host} is not loopback: {way_out}, or listen on 127.0.0.1")


def find_key(file: str | None, variable: str) -> str | None:
    """The key in a file, else in an environment variable, else None."""
    if not file:
        return os.environ.get(variable) or None
    try:
        key = Path(file).read_text().strip()
    except UnicodeDecodeError:
        raise UserError(f"--api-key-file {file} is not a text file") from None
    except OSError as error:
        raise UserError(f"--api-key-file {file}: {error.strerror}") from error
    if not key:
        raise UserError(f"--api-key-file {file} is empty; write the key into it")
    return key


def refusal(method: str, path: str, header: Callable[[str], str | None], key: str | None) -> tuple[int, str] | None:
    """(status, reason) for a request that is refused, None for one that is accepted."""
    if key:
        sent = (header("authorization") or "").removeprefix("Bearer ").strip() or header("x-api-key") or ""
        right = hmac.compare_digest(sent.encode(errors="replace"), key.encode(errors="replace"))
        if path != OPEN_PATH and not right:
            return 401, "the API key is missing or wrong: send 'Authorization: Bearer KEY'"
    elif not is_loopback(urlsplit(f"//{header('host') or ''}").hostname or ""):
        return 403, "without a key only requests to a loopback host are answered: ask 127.0.0.1, or set a key"
    kind = (header("content-type") or "").partition(";")[0].strip().lower()
    if method == "POST" and kind != "application/json":
        return 415, f"the content type is '{kind[:80]}'; send 'Content-Type: application/json'"
    return None


@dataclass(eq=False)
class BodyRefused(Exception):
    """A body that is not read to its end: it is too large or too slow, or too many arrive at the same time."""

    status: int
    reason: str


class ClientGone(Exception):
    """The client disconnected before its answer was ready, or before it had sent the whole request."""


@dataclass(eq=False)
class RequestGate:
    """ASGI middleware before every route: checks access, and limits the size and duration of request bodies.

    Access is checked before anything of the body is kept: a client without access must not be able to fill the memory.
    Refusals are answered here; the application must let `BodyRefused` pass.
    """

    app: Any
    key: str | None
    max_bytes: int
    read_s: float
    refuse: Callable[[int, str], Any]
    """The answer, an ASGI application, for a status and a reason."""
    held: int = 0
    """Bytes of bodies that are still arriving."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass on an accepted request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        body = IncomingBody(self, receive, send, headers)
        refused = refusal(scope["method"], scope["path"], headers.get, self.key)
        if refused is None and int(headers.get("content-length") or 0) > self.max_bytes:
            refused = self.too_large()
        try:
            app = self.app if refused is None else self.refuse(*refused)
            await app(scope, body.receive, body.send)
        except BodyRefused as error:
            await self.refuse(error.status, error.reason)(scope, body.receive, body.send)
        except ClientGone:
            pass  # the client left in the middle of the body: no one to answer
        finally:
            body.release()

    def too_large(self) -> tuple[int, str]:
        """The answer to a body over the limit."""
        return 413, f"the request is over the limit of {self.max_bytes} bytes"


class IncomingBody:
    """The body of one request while it arrives, and its unread rest when the answer is ready."""

    def __init__(self, gate: RequestGate, receive: Any, send: Any, headers: Mapping[str, str]) -> None:
        self._gate, self._receive, self._send = gate, receive, send
        self._now = asyncio.get_running_loop().time
        self._deadline = self._now() + gate.read_s
        self._complete = "transfer-encoding" not in headers and not int(headers.get("content-length") or 0)
        self._seen = self._held = 0

    async def receive(self) -> Any:
        """The next piece; `BodyRefused` if it is too large or too late, `ClientGone` if the client disconnected."""
        if self._complete:  # the next message is the disconnect, whenever that is
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._next()
        except TimeoutError:
            raise BodyRefused(408, f"the request did not arrive within {self._gate.read_s:g} s") from None
        if message["type"] == "http.disconnect":
            raise ClientGone
        size = len(message.get("body", b""))
        self._seen += size
        if self._seen > self._gate.max_bytes:
            raise BodyRefused(*self._gate.too_large())
        if self._complete:
            self.release()
        else:  # a body that arrives in one piece is kept only by code that uses it
            self._held += size
            self._gate.held += size
            if self._gate.held > HALF_BODIES * self._gate.max_bytes:
                raise BodyRefused(503, "too many requests are arriving at once; try again")
        return message

    async def _next(self) -> Any:
        message = await self._receive()
        self._complete = not message.get("more_body")
        return message

    async def send(self, message: Any) -> None:
        """Send the answer, but finish it only when the whole body has arrived, even if it is not used.

        Closing a connection with unread bytes resets it, and the reset may overtake the answer.
        """
        if not self._complete and message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
        elif not self._complete and not message.get("more_body"):
            await self._send({**message, "more_body": True})
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(min(self._deadline, self._now() + LINGER_S)):
                    while not self._complete:
                        await self._next()
            message = {"type": "http.response.body", "body": b""}
        await self._send(message)

    def release(self) -> None:
        """Stop counting its bytes as held."""
        self._gate.held -= self._held
        self._held = 0


@dataclass(eq=False)
class CalmEnd:
    """ASGI middleware: a request that is aborted (the client left, the server stops) ends without a traceback."""

    app: Any

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass the request on; if it is cancelled, answer with 503, or end an answer that has begun."""
        begun = False

        async def note_and_send(message: Any) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self.app(scope, receive, note_and_send)
        except asyncio.CancelledError:
            if scope["type"] != "http":
                raise
            if not begun:
                headers = [(b"content-type", b"application/json")]
                await send({"type": "http.response.start", "status": 503, "headers": headers})
            body = b"" if begun else b'{"error": {"message": "the request was broken off", "code": 503}}'
            await send({"type": "http.response.body", "body": body})


async def while_connected(receive: Callable[[], Awaitable[Any]], work: Awaitable[Result]) -> Result:
    """The result of the work; if the client disconnects, the work is cancelled, since others wait behind it.

    Call it after the body has been read: the next thing that the request's `receive` returns is then the disconnect.
    """
    doing, hung_up = asyncio.ensure_future(work), asyncio.ensure_future(receive())
    try:
        await asyncio.wait([doing, hung_up], return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise ClientGone
        return doing.result()
    finally:
        hung_up.cancel()
        if not doing.done():
            doing.cancel()
            await asyncio.wait([doing])  # so that what it holds (a slot, pages of a cache) is free when this returns


def metrics_page(prefix: str, counters: Mapping[str, Any], gauges: Mapping[str, Any]) -> str:
    """Numbers in Prometheus' text format; a counter that is a mapping becomes one line for each outcome."""
    lines = []
    for kind, suffix, values in (("counter", "_total", counters), ("gauge", "", gauges)):
        for name, value in values.items():
            title = f"{prefix}_{name}{suffix}"
            lines.append(f"# TYPE {title} {kind}")
            if isinstance(value, Mapping):
                lines += [f'{title}{{outcome="{outcome}"}} {count:.15g}' for outcome, count in value.items()]
            else:
                lines.append(f"{title} {value:.15g}")
    return "\n".join(lines) + "\n"
