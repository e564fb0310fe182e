"""Who may talk to our servers, and how a request ends that is broken off: one rule for all of them.

With a key: whoever sends it. Without one: programs of this machine only. So the server listens on loopback, and because
a page in a browser reaches loopback too, a request must name a loopback host (a page that rebinds its name to 127.0.0.1
names its own) and bring JSON that says so (a page of another origin may send only plain text or forms unasked).
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import os
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from upshot.core.errors import UserError

Result = TypeVar("Result")
OPEN_PATH = "/health"
"""Answered without a key."""


def is_loopback(host: str) -> bool:
    """Whether a host name or address is this machine's own."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def demand_key(host: str, key: str | None, way_out: str, said: str = "--host") -> None:
    """Refuse to listen beyond loopback without a key; `way_out` says how one is set, `said` where the host is."""
    if not key and not is_loopback(host):
        raise UserError(f"{said} {host} is not loopback: {way_out}, or listen on 127.0.0.1")


def find_key(file: str | None, variable: str) -> str | None:
    """The key in a file, else in an environment variable, else None."""
    if not file:
        return os.environ.get(variable) or None
    try:
        key = Path(file).read_text().strip()
    except UnicodeDecodeError:
        raise UserError(f"--api-key-file {file} is no text file") from None
    except OSError as error:
        raise UserError(f"--api-key-file {file}: {error.strerror}") from error
    if not key:
        raise UserError(f"--api-key-file {file} is empty; write the key into it")
    return key


def refusal(method: str, path: str, header: Callable[[str], str | None], key: str | None) -> tuple[int, str] | None:
    """(status, reason) for a request that may not come in, None for one that may."""
    if key:
        if path != OPEN_PATH and not _brings(key, header):
            return 401, "the API key is missing or wrong: send 'Authorization: Bearer KEY'"
    elif not is_loopback(_host_name(header("host") or "")):
        return 403, "without a key only requests to a loopback host are answered: ask 127.0.0.1, or set a key"
    kind = (header("content-type") or "").partition(";")[0].strip().lower()
    if method == "POST" and kind != "application/json":
        return 415, f"the content type is '{kind[:80]}'; send 'Content-Type: application/json'"
    return None


class TooLarge(Exception):
    """A request over the size limit."""


class TooSlow(Exception):
    """A request whose body did not arrive in time."""


class RequestGate:
    """ASGI middleware in front of every route: who may come in, and the size and pace of what comes in.

    Before anything is read of the body: who may not come in must not fill the memory either.
    """

    def __init__(
        self, app: Any, key: str | None, max_bytes: int, read_s: float, refuse: Callable[[int, str], Any]
    ) -> None:
        self.app = app
        self.key = key
        self.max_bytes = max_bytes
        self.read_s = read_s
        self.refuse = refuse
        """The answer, an ASGI application, for a status and a reason."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass on what may come in."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        refused = refusal(scope["method"], scope["path"], headers.get, self.key)
        if refused is None and int(headers.get("content-length") or 0) > self.max_bytes:
            refused = 413, f"the request is over the limit of {self.max_bytes} bytes"
        if refused is not None:
            await self.refuse(*refused)(scope, receive, send)
            return
        await self.app(scope, self.bounded(receive), send)

    def bounded(self, receive: Any) -> Any:
        """Count a body that came without its length, and do not wait for it for ever."""
        seen, complete = 0, False
        deadline = asyncio.get_running_loop().time() + self.read_s

        async def bounded() -> Any:
            nonlocal seen, complete
            if complete:  # what comes now is the hang-up, whenever that is
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise TooSlow from None
            complete = not message.get("more_body")
            seen += len(message.get("body", b""))
            if seen > self.max_bytes:
                raise TooLarge
            return message

        return bounded


class CalmEnd:
    """ASGI middleware: a request that is broken off (the client went, the server stops) ends without a traceback."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass the request on; one that is cancelled is answered with 503, or its answer is ended."""
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


class ClientGone(Exception):
    """The client has hung up before its answer was ready."""


async def while_connected(receive: Callable[[], Awaitable[Any]], work: Awaitable[Result]) -> Result:
    """The result of the work, unless the client hangs up: then the work is cancelled, for others wait behind it.

    To be called when the body has been read: what `receive` (the request's) brings next is the hang-up.
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
            await asyncio.wait([doing])  # what it holds (a slot, pages of a cache) is free when this returns


def metrics_page(prefix: str, counters: Mapping[str, Any], gauges: Mapping[str, Any]) -> str:
    """Numbers in Prometheus' text format; a counter that is a mapping is told by its outcomes."""
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


def _brings(key: str, header: Callable[[str], str | None]) -> bool:
    given = (header("authorization") or "").removeprefix("Bearer ").strip() or header("x-api-key") or ""
    return hmac.compare_digest(given.encode(errors="replace"), key.encode(errors="replace"))


def _host_name(value: str) -> str:
    """The name in a Host header, without its port."""
    return value[1:].partition("]")[0] if value.startswith("[") else value.partition(":")[0]
