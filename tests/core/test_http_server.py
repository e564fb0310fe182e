"""Servers: a request that is broken off ends calmly."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from upshot.core.http_server import CalmEnd


def broken_off(begun: bool, kind: str = "http") -> list[dict[str, Any]]:
    """What is sent of a request that hangs and is cancelled."""
    sent: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if begun:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        await asyncio.sleep(60)

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def go() -> None:
        task = asyncio.create_task(CalmEnd(app)({"type": kind}, None, send))
        await asyncio.sleep(0)
        task.cancel()
        await task

    asyncio.run(go())
    return sent


def test_a_request_that_is_broken_off_ends_without_a_traceback() -> None:
    start, body = broken_off(begun=False)
    assert start["status"] == 503 and b"broken off" in body["body"]


def test_an_answer_that_is_broken_off_is_ended() -> None:
    assert [message["type"] for message in broken_off(begun=True)] == ["http.response.start", "http.response.body"]


def test_what_is_no_request_is_cancelled_as_ever() -> None:
    with pytest.raises(asyncio.CancelledError):
        broken_off(begun=False, kind="lifespan")


def test_both_servers_end_calmly() -> None:
    from upshot.sandbox.http import server as sandbox
    from upshot.serving.openai import server

    for module in (server, sandbox):
        assert module.CalmEnd is CalmEnd
