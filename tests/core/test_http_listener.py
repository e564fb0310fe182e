"""Connections: bounded in number and in time; a server that is asked to stop has not failed."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any

import pytest
import uvicorn

from tests.patience import patience
from upshot.core import http_listener as module


def test_excess_slow_and_oversized_connections_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HEAD_S", patience(0.3))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    async def scenario() -> None:
        config = uvicorn.Config(app, http=module.http_protocol(2), ws="none", lifespan="off", log_level="error")
        serving = uvicorn.Server(config)
        listener = socket.create_server(("127.0.0.1", 0))
        task = asyncio.create_task(serving.serve(sockets=[listener]))
        address = listener.getsockname()
        slow, drips = [await asyncio.open_connection(*address) for _ in range(2)]
        full = await asyncio.open_connection(*address)
        assert (await full[0].read()).startswith(b"HTTP/1.1 503")
        drips[1].write(b"GET / HTTP/1.1\r\n\r\n")
        assert (await drips[0].readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        drips[1].write(b"GET / HTTP/1.1\r\nX: ")
        assert await slow[0].read() == b""
        assert await drips[0].read() == b""
        wordy = await asyncio.open_connection(*address)
        wordy[1].write(b"GET / HTTP/1.1\r\nX: " + b"x" * (1 << 20))
        with contextlib.suppress(ConnectionError):
            assert b"200" not in await wordy[0].read()
        serving.should_exit = True
        await task
        for _, writer in (slow, drips, full, wordy):
            writer.close()

    asyncio.run(scenario())
