"""Servers: an interrupted request ends without a traceback, a refused one gets the reason."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from starlette.responses import PlainTextResponse

from tests.patience import patience
from upshot.core.http_server import CalmEnd, ClientGone, RequestGate, metrics_page, while_connected


def broken_off(begun: bool, kind: str = "http") -> list[dict[str, Any]]:
    """What is sent for a request that hangs and is then cancelled."""
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


def test_an_interrupted_request_ends_without_a_traceback() -> None:
    start, body = broken_off(begun=False)
    assert start["status"] == 503 and b"broken off" in body["body"]


def test_an_interrupted_answer_is_ended() -> None:
    assert [message["type"] for message in broken_off(begun=True)] == ["http.response.start", "http.response.body"]


def test_cancellation_outside_a_request_works_as_usual() -> None:
    with pytest.raises(asyncio.CancelledError):
        broken_off(begun=False, kind="lifespan")


def test_both_servers_end_without_a_traceback() -> None:
    from upshot.sandbox.http import server as sandbox
    from upshot.serving.openai import base as server

    for module in (server, sandbox):
        assert module.CalmEnd is CalmEnd


def test_abandoned_work_is_cancelled_and_its_cleanup_awaited() -> None:
    ended: list[str] = []

    async def work() -> str:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            ended.append("freed")
        return "late"

    async def hang_up() -> None:
        await asyncio.sleep(0.01)

    with pytest.raises(ClientGone):
        asyncio.run(while_connected(hang_up, work()))
    assert ended == ["freed"]


def test_a_result_ready_before_the_client_leaves_is_sent_and_failures_keep_their_type() -> None:
    async def never() -> None:
        await asyncio.sleep(60)

    async def fail() -> None:
        raise ZeroDivisionError

    assert asyncio.run(while_connected(never, asyncio.sleep(0, "answer"))) == "answer"
    with pytest.raises(ZeroDivisionError):
        asyncio.run(while_connected(never, fail()))


def test_prometheus_numbers_are_written_in_full_precision() -> None:
    page = metrics_page("upshot", {"tokens": 12345678, "tests": {"passed": 2}}, {"running": 0.5})
    assert page.splitlines() == [
        *("# TYPE upshot_tokens_total counter", "upshot_tokens_total 12345678"),
        *("# TYPE upshot_tests_total counter", 'upshot_tests_total{outcome="passed"} 2'),
        *("# TYPE upshot_running gauge", "upshot_running 0.5"),
    ]


LIMIT = 1 << 16


async def read_all(scope: Any, receive: Any, send: Any) -> None:
    """Return the length of the body."""
    size, more = 0, True
    while more:
        message = await receive()
        size, more = size + len(message["body"]), message["more_body"]
    await PlainTextResponse(str(size))(scope, receive, send)


def gate(app: Any = read_all, read_s: float = 60.0, limit: int = LIMIT) -> RequestGate:
    return RequestGate(app, None, limit, read_s, lambda status, reason: PlainTextResponse(reason, status))


@asynccontextmanager
async def serving(app: Any) -> AsyncIterator[tuple[str, int]]:
    """Serve an application; yields its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_level="critical", timeout_graceful_shutdown=1))
        task = asyncio.create_task(server.serve(sockets=[listener]))
        yield listener.getsockname()
        server.should_exit = True
        await task


def headed(size: int, kind: str = "application/json", chunked: bool = False) -> bytes:
    length = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {size}"
    return f"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\n{length}\r\n\r\n".encode()


async def send_and_read(address: tuple[str, int], *pieces: bytes) -> bytes:
    """Send everything before reading the answer, as most clients do."""
    reader, writer = await asyncio.open_connection(*address)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        return await reader.read()
    finally:
        writer.close()


@pytest.mark.parametrize(
    ("kind", "chunked", "status"),
    [("application/json", False, 413), ("application/json", True, 413), ("text/plain", False, 415)],
)
def test_an_oversized_or_wrong_request_is_answered_before_the_connection_closes(
    kind: str, chunked: bool, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a connection is closed with unread bytes on it, it is reset and the client never sees the answer."""
    monkeypatch.setattr("upshot.core.http_server.LINGER_S", patience(60))
    body = b"x" * (8 << 20)
    sent = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body) if chunked else body

    async def run() -> list[bytes]:
        async with serving(gate()) as address:
            return [await send_and_read(address, headed(len(body), kind, chunked), sent) for _ in range(5)]

    for answer in asyncio.run(run()):
        assert answer.startswith(f"HTTP/1.1 {status} ".encode()) and b"connection: close" in answer.lower()


def test_discarding_a_refused_body_is_bounded_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("upshot.core.http_server.LINGER_S", 0.2)

    async def run() -> bytes:
        async with serving(gate()) as address:
            return await send_and_read(address, headed(1 << 30), b"x")  # the rest never arrives, and it still ends

    assert asyncio.run(run()).startswith(b"HTTP/1.1 413 ")


def test_a_body_of_the_right_size_keeps_its_connection() -> None:
    async def run() -> bytes:
        async with serving(gate()) as address:
            ask = headed(LIMIT) + b"x" * LIMIT
            return await send_and_read(address, ask, ask, headed(1, "text/plain"), b"x")

    answers = asyncio.run(run())
    assert answers.count(b"HTTP/1.1 200 ") == 2 and answers.count(b"HTTP/1.1 415 ") == 1


def test_unfinished_bodies_are_held_up_to_a_bound_and_whole_ones_get_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("upshot.core.http_server.HALF_BODIES", 2)
    monkeypatch.setattr("upshot.core.http_server.LINGER_S", 0.1)
    door = gate(read_s=600)

    async def run() -> tuple[bytes, bytes]:
        async with serving(door) as address:
            half = [await asyncio.open_connection(*address) for _ in range(4)]
            for number, (_, writer) in enumerate(half):
                writer.write(headed(LIMIT) + b"x" * (LIMIT // 2))
                while door.held < min(number + 1, 4) * LIMIT // 2:
                    await asyncio.sleep(0.001)
            small = await send_and_read(address, headed(1) + b"x", headed(1, "text/plain"), b"x")
            more = await send_and_read(address, headed(LIMIT) + b"x" * 100, b"")
            for _, writer in half:
                writer.close()
            while door.held:
                await asyncio.sleep(0.001)
            return small, more

    small, more = asyncio.run(run())
    assert small.startswith(b"HTTP/1.1 200 ") and more.startswith(b"HTTP/1.1 503 ")


def test_a_body_that_never_arrives_is_refused() -> None:
    async def dawdle() -> Any:
        await asyncio.sleep(600)

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json"), (b"content-length", b"5")]
    scope = {"type": "http", "method": "POST", "path": "/", "headers": headers}
    asyncio.run(gate(read_s=0.05)(scope, dawdle, send))
    assert sent[0]["status"] == 408 and b"within 0.05 s" in sent[1]["body"]
