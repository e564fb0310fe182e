"""One HTTP client: transient failures are retried, others are not, and every failure has a countable reason."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from upshot.core.errors import UserError
from upshot.core.http_client import LONGEST_BACKOFF_S, AttemptError, HttpClient, RetryPolicy, backoff, retry_after

NOW = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, None),
        ("", None),
        ("3", 3.0),
        ("0.25", 0.25),
        ("-1", 0.0),
        ("Thu, 01 Jan 2026 12:00:30 GMT", 30.0),
        ("Thu, 01 Jan 2026 11:00:00 GMT", 0.0),
        ("soon", None),
    ],
)
def test_retry_after_is_read_as_seconds_or_as_a_date(header, seconds):
    assert retry_after(header, NOW) == seconds


@given(st.integers(0, 60), st.floats(0.01, 2), st.integers())
def test_backoff_doubles_with_jitter_and_has_a_ceiling(attempt, first, seed):
    wait = backoff(attempt, first, random.Random(seed))
    mean = min(LONGEST_BACKOFF_S, first * 2**attempt)
    assert 0.5 * mean <= wait <= 1.5 * mean


Answer = Callable[[int], web.Response]
"""The server's answer to request number i, counted from 1."""
FAST = RetryPolicy(retries=3, backoff_s=0.001)


@asynccontextmanager
async def server(answer: Answer, delay: float = 0.0) -> AsyncIterator[tuple[str, list[Any]]]:
    """Its address, and the bodies that it received."""
    seen: list[Any] = []

    async def handle(request: web.Request) -> web.Response:
        seen.append(await request.json() if request.can_read_body else None)
        await asyncio.sleep(delay)
        return answer(len(seen))

    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", seen
    finally:
        await runner.cleanup()


def call(answer: Answer, delay: float = 0.0, retry: RetryPolicy = FAST, **options: Any) -> tuple[Any, int]:
    """The answer or the error of one POST, and how many requests it took; with a delay, it times out."""

    async def run() -> tuple[Any, int]:
        async with server(answer, delay) as (url, seen):
            client = HttpClient(url, retry=retry, timeout_s=0.5 if delay else 60.0)
            try:
                return (await client.request("POST", "/x", {"a": 1}, **options))[0], len(seen)
            except AttemptError as error:
                return error, len(seen)
            finally:
                await client.aclose()

    return asyncio.run(run())


def failing(status: int, times: int = 99, **headers: str) -> Answer:
    """Fails this often, then answers."""
    return lambda i: web.Response(status=status, headers=headers) if i <= times else web.json_response({"i": i})


@pytest.mark.parametrize("status", [408, 409, 425, 429, 500, 502, 503, 504])
def test_transient_failures_are_retried(status: int) -> None:
    assert call(failing(status, times=2)) == ({"i": 3}, 3)


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 422])
def test_refusals_are_not_retried(status: int) -> None:
    error, sent = call(failing(status))
    assert (error.reason, error.status, sent) == (f"http_{status}", status, 1)


def test_every_lasting_failure_has_its_reason() -> None:
    error, sent = call(failing(500))
    assert (error.reason, sent) == ("http_500", 4)
    assert call(failing(429))[0].reason == "rate_limited"
    assert call(lambda i: web.Response(text="no json"))[0].reason == "bad_response"
    assert call(lambda i: web.json_response([1]))[0].reason == "bad_response"
    assert call(lambda i: web.json_response({}), delay=2.0, retry=RetryPolicy())[0].reason == "timeout"

    async def nobody() -> str:
        with pytest.raises(AttemptError) as caught:
            await HttpClient("http://127.0.0.1:9", retry=FAST).request("GET", "/")
        return caught.value.reason

    assert asyncio.run(nobody()) == "connection"


def test_a_retry_after_header_is_obeyed() -> None:
    began = time.monotonic()
    assert call(failing(429, 1, **{"Retry-After": "0.3"}))[1] == 2
    assert time.monotonic() - began >= 0.3


def test_rate_limits_may_be_retried_for_a_time_of_their_own() -> None:
    patient = RetryPolicy(retries=0, backoff_s=0.001, patience_s=5.0)
    assert call(failing(429, times=6), retry=patient) == ({"i": 7}, 7)
    error, sent = call(failing(429, **{"Retry-After": "0.2"}), retry=RetryPolicy(9, 0.001, patience_s=0.5))
    assert error.reason == "rate_limited" and sent <= 3


def test_a_request_that_the_server_may_have_begun_is_repeated_only_if_allowed() -> None:
    assert call(failing(500, times=1), repeat="any")[1] == 2
    assert call(failing(500, times=1), repeat="unbegun")[1] == 1
    assert call(lambda i: web.json_response({}), delay=2.0, repeat="unbegun")[1] == 1
    for full in (429, 503):
        assert call(failing(full, times=1), repeat="unbegun")[1] == 2
        assert call(failing(full, times=1), repeat="never")[1] == 1


def test_retries_are_reported_to_their_counter() -> None:
    told: list[str] = []
    call(lambda i: failing(503 if i == 1 else 429, 2)(i), on_retry=lambda error: told.append(error.reason))
    assert told == ["http_503", "rate_limited"]


def test_no_more_connections_are_open_than_allowed() -> None:
    busy = most = 0

    async def handle(request: web.Request) -> web.Response:
        nonlocal busy, most
        busy += 1
        most = max(most, busy)
        await asyncio.sleep(0.02)
        busy -= 1
        return web.json_response({})

    async def run() -> None:
        app = web.Application()
        app.router.add_get("/", handle)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        client = HttpClient(f"http://127.0.0.1:{runner.addresses[0][1]}", connections=3)
        await asyncio.gather(*(client.request("GET", "/") for _ in range(12)))
        await client.aclose()
        await runner.cleanup()

    asyncio.run(run())
    assert most == 3


def test_an_invalid_url_is_a_user_error() -> None:
    async def run() -> None:
        client = HttpClient("http://:80:80")
        try:
            await client.request("GET", "/")
        finally:
            await client.aclose()

    with pytest.raises(UserError, match="is not a URL"):
        asyncio.run(run())
