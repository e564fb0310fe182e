"""Servers: a request that is broken off ends calmly."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from upshot.core.http_server import CalmEnd, ClientGone, metrics_page, while_connected


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


def test_work_that_nobody_waits_for_any_more_is_cancelled_to_its_end() -> None:
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


def test_what_is_ready_before_the_client_goes_is_answered_and_failures_stay_what_they_are() -> None:
    async def never() -> None:
        await asyncio.sleep(60)

    async def fail() -> None:
        raise ZeroDivisionError

    assert asyncio.run(while_connected(never, asyncio.sleep(0, "answer"))) == "answer"
    with pytest.raises(ZeroDivisionError):
        asyncio.run(while_connected(never, fail()))


def test_numbers_are_told_in_full_in_prometheus_form() -> None:
    page = metrics_page("upshot", {"tokens": 12345678, "tests": {"passed": 2}}, {"running": 0.5})
    assert page.splitlines() == [
        *("# TYPE upshot_tokens_total counter", "upshot_tokens_total 12345678"),
        *("# TYPE upshot_tests_total counter", 'upshot_tests_total{outcome="passed"} 2'),
        *("# TYPE upshot_running gauge", "upshot_running 0.5"),
    ]
