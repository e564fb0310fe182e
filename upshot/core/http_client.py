"""JSON over HTTP to servers that may be busy, slow or gone: one client, one rule for retries.

    client = HttpClient("http://host:8000", retry=RetryPolicy(retries=3))
    answer, headers = await client.request("POST", "/verify", {"response": "42"})

Failures that may be temporary (a broken connection, a timeout, 429, 5xx, an unreadable answer) are retried with
jittered exponential backoff, never sooner than a Retry-After header asks. If no retry helps, an `AttemptError` with a
short, countable reason is raised. Streams are not retried. Callers count, and decide what a failure means.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, Literal

from upshot.core.errors import UserError
from upshot.core.time_limit import pause_clock

if TYPE_CHECKING:
    import aiohttp

LONGEST_BACKOFF_S = 20.0
PASSING = (408, 409, 425, 429)
"""Statuses below 500 with which another attempt may succeed."""
UNBEGUN = (429, 503)
"""Statuses of a server that has not started to process the request."""
Repeat = Literal["any", "unbegun", "never"]
"""Which failures are retried: all that may be temporary, those where the server cannot have begun, or none."""


@dataclass(eq=False)
class AttemptError(Exception):
    """One attempt of a call failed; another one may succeed (`passing`)."""

    reason: str
    """timeout, rate_limited, connection, http_500, bad_response …"""
    detail: str = ""
    wait_s: float | None = None
    """Seconds that the server asked us to wait."""
    status: int | None = None
    """HTTP status of the answer; None if there was no readable answer."""
    begun: bool = True
    """Whether the server may have started to process the request."""

    def __str__(self) -> str:
        return self.detail

    @property
    def passing(self) -> bool:
        """Whether another attempt may succeed."""
        return self.status is None or self.status >= 500 or self.status in PASSING


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often, and for how long, a failed call is retried."""

    retries: int = 0
    backoff_s: float = 0.2
    """Mean wait before the first retry; doubles with each one."""
    patience_s: float | None = None
    """Most seconds to wait in all because of rate limits (429); None: they count as retries like other failures."""


class Retries:
    """Counts the failed attempts of one call, and says how long it waits before the next one."""

    def __init__(self, policy: RetryPolicy, rng: random.Random | None = None) -> None:
        self._policy = policy
        self._rng = rng or random.Random()
        self._failed = self._limited = 0
        self._waited = 0.0

    @property
    def attempts(self) -> int:
        """Attempts that failed."""
        return self._failed + self._limited

    def next_wait(self, error: AttemptError) -> float | None:
        """Seconds until the next attempt after this failure; None: give up."""
        patience = self._policy.patience_s
        if error.reason == "rate_limited" and patience is not None:
            wait = self._wait(error, self._limited)
            self._limited += 1
            self._waited += wait
            return wait if self._waited <= patience else None
        wait = self._wait(error, self._failed)
        self._failed += 1
        return wait if self._failed <= self._policy.retries else None

    def _wait(self, error: AttemptError, attempt: int) -> float:
        jittered = backoff(attempt, self._policy.backoff_s, self._rng)
        wait_s = error.wait_s
        return jittered if wait_s is None else wait_s + min(jittered, 0.25 * wait_s + 0.05)  # never sooner than asked


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """A server's answer."""

    status: int
    headers: Mapping[str, str]
    raw: bytes

    def json_object(self) -> dict[str, Any]:
        """The JSON object of the body; `AttemptError` if it is not one."""
        try:
            value = json.loads(self.raw)
        except ValueError as error:
            raise self.unreadable(error) from error
        if not isinstance(value, dict):
            raise self.unreadable(f"a {type(value).__name__}, not an object")
        return value

    def unreadable(self, why: object) -> AttemptError:
        """The failure of an answer that is not what the API promises."""
        return AttemptError("bad_response", f"unreadable answer of {len(self.raw)} bytes ({why})")

    def failure(self) -> AttemptError:
        """The failure that the status stands for."""
        reason = "rate_limited" if self.status == 429 else f"http_{self.status}"
        wait = retry_after(self.headers.get("Retry-After"))
        return AttemptError(reason, error_detail(self.raw), wait, self.status, begun=self.status not in UNBEGUN)


class HttpClient:
    """Connections to one server, opened with the first request."""

    def __init__(
        self,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
        connections: int = 0,
        retry: RetryPolicy | None = None,
        proxies: bool = False,
    ) -> None:
        self.url = url.rstrip("/")
        self.timeout_s = timeout_s
        """Time limit of one attempt in seconds, including the time to connect."""
        self.retry = retry or RetryPolicy()
        self._headers = {"Content-Type": "application/json", **(headers or {})}
        self._connections = connections
        """Most connections at once; 0: the caller limits them."""
        self._proxies = proxies
        """Whether the environment's proxies are used."""
        self._session: aiohttp.ClientSession | None = None

    @pause_clock
    async def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        repeat: Repeat = "any",
        on_retry: Callable[[AttemptError], None] | None = None,
    ) -> tuple[dict[str, Any], Mapping[str, str]]:
        """The JSON object and headers of an answer with a status below 300, or the last `AttemptError`."""
        retries = Retries(self.retry)
        while True:
            try:
                answer = await self.send(method, path, body, headers=headers, timeout_s=timeout_s)
                if answer.status >= 300:
                    raise answer.failure()
                return answer.json_object(), answer.headers
            except AttemptError as error:
                again = error.passing and (repeat == "any" or (repeat == "unbegun" and not error.begun))
                wait = retries.next_wait(error) if again else None
                if wait is None:
                    raise
                if on_retry is not None:
                    on_retry(error)
            await asyncio.sleep(wait)

    async def send(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> HttpAnswer:
        """One attempt; an answer of any status is returned, `AttemptError` means that there was none."""
        import aiohttp

        session = self._open()
        data = None if body is None else json.dumps(body, separators=(",", ":"), default=dict).encode()
        seconds = self.timeout_s if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(seconds):
                async with session.request(method, self.url + path, data=data, headers=headers) as response:
                    return HttpAnswer(response.status, response.headers, await response.read())
        except TimeoutError as error:
            raise AttemptError("timeout", f"no answer within {seconds:g} s") from error
        except aiohttp.InvalidURL as error:
            raise UserError(f"'{self.url}' is not a URL") from error
        except (aiohttp.ClientError, OSError) as error:
            begun = not isinstance(error, aiohttp.ClientConnectorError)
            raise AttemptError("connection", str(error) or type(error).__name__, begun=begun) from error
        except RuntimeError as error:
            if not session.closed:
                raise
            # aiohttp raises this if the session is closed before the request is sent
            raise AttemptError("connection", "the client was closed", begun=False) from error

    async def events(
        self, path: str, body: Any, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[dict[str, Any]]:
        """The server-sent events of one POST, as they arrive; `AttemptError` if it is refused or breaks off."""
        import aiohttp

        data = json.dumps({**body}, separators=(",", ":"), default=dict).encode()
        try:
            async with self._open().post(self.url + path, data=data, headers=headers) as response:
                if response.status != 200:
                    raise HttpAnswer(response.status, response.headers, await response.read()).failure()
                async for line in response.content:
                    event = line.removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
                    if event and event != b"[DONE]" and isinstance(message := json.loads(event), dict):
                        yield message
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise AttemptError("connection", str(error) or type(error).__name__) from error

    def _open(self) -> aiohttp.ClientSession:
        import aiohttp

        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=self._connections, ttl_dns_cache=300, keepalive_timeout=30),
                headers=self._headers,
                timeout=aiohttp.ClientTimeout(total=None),  # each attempt has its own deadline
                trust_env=self._proxies,
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session

    async def aclose(self) -> None:
        """Close the connections; requests in flight fail."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()


def retry_after(value: str | None, now: datetime | None = None) -> float | None:
    """Seconds that a Retry-After header asks for (a number or an HTTP date); None if it is absent or unreadable."""
    if not value:
        return None
    with suppress(ValueError):
        return max(0.0, float(value))
    with suppress(ValueError):
        when = parsedate_to_datetime(value)
        when = when.replace(tzinfo=when.tzinfo or UTC)
        return max(0.0, (when - (now or datetime.now(UTC))).total_seconds())
    return None


def backoff(attempt: int, first: float, rng: random.Random) -> float:
    """Seconds before retry number `attempt` (from 0): exponential, jittered by half on both sides."""
    return min(LONGEST_BACKOFF_S, first * 2**attempt) * rng.uniform(0.5, 1.5)


def error_detail(raw: bytes) -> str:
    """The message of an error body, shortened."""
    text = raw.decode("utf-8", "replace")
    with suppress(ValueError):
        data = json.loads(text)
        error = data.get("error", data) if isinstance(data, dict) else data
        if isinstance(error, dict):
            parts = [error.get("code"), error.get("message") or error.get("detail")]
            text = ": ".join(str(part) for part in parts if part) or text
        else:
            text = str(error)
    return " ".join(text.split())[:300]
