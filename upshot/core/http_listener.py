"""Serves an ASGI application on a socket until a signal; limits the number of connections, and closes slow ones.

`http_server.py` limits the requests themselves.
"""

from __future__ import annotations

import asyncio
import resource
import signal
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from typing import Any

from upshot.core.errors import UserError

HEAD_S = 60.0
"""Time limit for the head of a request, in seconds."""
MAX_HEAD_BYTES = 64 << 10
MAX_CONNECTIONS = 8192
OWN_DESCRIPTORS = 64
_FULL = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; `UserError` if it cannot be opened."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=4096)
    except OSError as error:
        raise UserError(f"cannot listen on {host}:{port}: {error.strerror or error}; choose another --port") from error


async def serve_app(app: Any, listener: socket.socket, drain_s: int, descriptors: int = 0) -> None:
    """Serve until SIGINT or SIGTERM; running requests then have `drain_s` seconds to finish.

    `descriptors`: how many file descriptors the application needs besides the connections.
    """
    server = _make_server(app, descriptors, timeout_graceful_shutdown=drain_s, timeout_keep_alive=120)
    if threading.current_thread() is threading.main_thread():
        # uvicorn raises the signal that ended it once more: a server that was asked to stop, and did, has not failed.
        signal.signal(signal.SIGTERM, lambda *_: setattr(server, "should_exit", True))
    await server.serve(sockets=[listener])


@asynccontextmanager
async def serve_beside(app: Any, listener: socket.socket) -> AsyncIterator[None]:
    """Serve on the caller's event loop until the context ends; signals are left to the caller."""
    server = _make_server(app, lifespan="off", timeout_graceful_shutdown=1)
    server.capture_signals = nullcontext
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    try:
        while not server.started and not serving.done():
            await asyncio.sleep(0.005)
        yield
    finally:
        server.should_exit = True
        await serving


def _make_server(app: Any, descriptors: int = 0, **more: Any) -> Any:
    import uvicorn

    # Raise the soft limit of this process, then allow as many connections as leave the application its descriptors.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 1 << 16 if hard == resource.RLIM_INFINITY else min(hard, 1 << 16)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    most = (soft if soft != resource.RLIM_INFINITY else wanted) - OWN_DESCRIPTORS - descriptors
    http = http_protocol(max(16, min(MAX_CONNECTIONS, most)))
    return uvicorn.Server(uvicorn.Config(app, http=http, ws="none", log_level="warning", access_log=False, **more))


def http_protocol(most: int) -> type[asyncio.Protocol]:
    """uvicorn's HTTP protocol for a limited number of connections, each with a time limit for a request's head.

    uvicorn's own limits do not help: `limit_concurrency` refuses requests (also to `/health`), not connections that
    never send one; `timeout_keep_alive` starts after the first answer; only its slow parser limits the head's size.
    """
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    base: Any = AutoHTTPProtocol

    class BoundedProtocol(base):  # type: ignore[misc]
        """Closes connections that are too many, too slow, or whose head is too long; the rest is uvicorn's."""

        _deadline: asyncio.TimerHandle | None = None
        _head_bytes = 0

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            if len(self.connections) > most:
                transport.write(_FULL)
                transport.close()
                return
            self._await_head()

        def data_received(self, data: bytes) -> None:
            # uvicorn makes a new `cycle` when a request's head is complete: until then the clock and the count run.
            before = self.cycle
            super().data_received(data)
            if self.cycle is not before:
                self._stop_waiting()
            elif before is None or before.response_complete:
                self._head_bytes += len(data)
                if self._head_bytes > MAX_HEAD_BYTES:
                    self.transport.close()
                elif self._deadline is None:
                    self._await_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            super().connection_lost(exc)

        def _await_head(self) -> None:
            self._deadline = asyncio.get_running_loop().call_later(HEAD_S, self.transport.close)

        def _stop_waiting(self) -> None:
            self._head_bytes = 0
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

    return BoundedProtocol
