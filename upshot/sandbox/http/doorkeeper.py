"""The server's connections: how many at once, and how long one may take to say what it wants."""

from __future__ import annotations

import asyncio
import resource
from typing import Any

READ_SECONDS = 60.0
"""For the head of a request, and once more for its body."""
MAX_HEAD_BYTES = 64 << 10
MAX_CONNECTIONS = 8192
_FULL = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


def connections_at_once(slots: int) -> int:
    """How many connections leave descriptors for the runs; raises this process's soft limit first."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 1 << 16 if hard == resource.RLIM_INFINITY else min(hard, 1 << 16)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return max(16, min(MAX_CONNECTIONS, (soft if soft != resource.RLIM_INFINITY else wanted) - 64 - 32 * slots))


def http_protocol(most: int) -> type[asyncio.Protocol]:
    """uvicorn's HTTP protocol for at most so many connections, none of which may dawdle over a request's head."""
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    base: Any = AutoHTTPProtocol

    class Doorkeeper(base):  # type: ignore[misc]
        """Closes what is too many, too slow or too long-winded; the rest is uvicorn's."""

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
            self._deadline = asyncio.get_running_loop().call_later(READ_SECONDS, self.transport.close)

        def _stop_waiting(self) -> None:
            self._head_bytes = 0
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

    return Doorkeeper
