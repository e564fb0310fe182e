"""A time limit for code that is not ours: a metric, participant, environment or verifier of the user's own.

What it waits for is cancelled when its time is up. What it computes without waiting would hold up everything else, so
that is interrupted (`alarm.py`), whichever thread it runs in. Two things cannot be ended: a call inside a C library
that does not return to Python, and code that catches the cancellation and goes on.

Not counted: the time in which the program itself works for that code (helper models, sandbox, worker processes, all of
which have limits of their own) or stands still at a `breakpoint()`.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar, cast

from upshot.core.alarm import TimeUp, alarm

T = TypeVar("T")
P = ParamSpec("P")

call_seconds: ContextVar[float] = ContextVar("call_seconds", default=120.0)
"""The limit of one call; a run sets its recipe's."""
LATE_S = 1.0
"""A timer this late means that the whole program stood still; its time is given once more."""

_clock: ContextVar[_Clock | None] = ContextVar("_clock", default=None)


class CallTimeout(Exception):
    """A call of the user's own code took longer than its limit."""

    reason = "timeout"


async def limited(owner: object, method: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a method of `owner`; `CallTimeout` when `owner` is the user's own code and takes too long.

    The user's method may be a plain function, too: it is called here, and everything else waits meanwhile.
    """
    if _ours(owner):
        return await method(*args, **kwargs)
    work: Any = limited_now(owner, method, *args, **kwargs)
    if not asyncio.iscoroutine(work):
        return cast(T, await work if inspect.isawaitable(work) else work)
    seconds = call_seconds.get()
    with _clock_of(owner, seconds) as clock:
        async with asyncio.timeout(None) as timeout:
            clock.start(timeout)
            return cast(T, await _in_stretches(work, seconds))


def limited_now(owner: object, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The same for a call that does not wait."""
    if _ours(owner):
        return work(*args, **kwargs)
    seconds = call_seconds.get()
    try:
        with alarm(seconds):
            return work(*args, **kwargs)
    except TimeUp:
        raise _too_long(owner, seconds) from None


def uncounted(work: Callable[P, Awaitable[T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Decorates what has a limit of its own: the clock of whoever calls it stands still meanwhile."""

    @functools.wraps(work)
    async def held(*args: P.args, **kwargs: P.kwargs) -> T:
        clock = _clock.get()
        if clock is None:
            return await work(*args, **kwargs)
        clock.hold()
        try:
            return await work(*args, **kwargs)
        finally:
            clock.release()

    return held


class _Clock:
    """Counts down the seconds of one call, except while it is held."""

    def __init__(self, seconds: float) -> None:
        self.seconds = self._left = seconds
        self._holds = 0
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._timeout: asyncio.Timeout | None = None

    def start(self, timeout: asyncio.Timeout) -> None:
        self._timeout = timeout
        self._run()

    def hold(self) -> None:
        self._holds += 1
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._left = max(self._due - asyncio.get_running_loop().time(), 0.0)

    def release(self) -> None:
        self._holds -= 1
        if not self._holds and self._timeout is not None:
            self._run()

    def stop(self) -> None:
        self._timeout = None
        if self._timer is not None:
            self._timer.cancel()

    def _run(self) -> None:
        loop = asyncio.get_running_loop()
        self._due = loop.time() + self._left
        self._timer = loop.call_at(self._due, self._up)

    def _up(self) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._due > LATE_S:
            self._left = self.seconds
            self._run()
        elif self._timeout is not None:
            self._timeout.reschedule(now)


@contextmanager
def _clock_of(owner: object, seconds: float) -> Iterator[_Clock]:
    clock = _Clock(seconds)
    before = _clock.set(clock)
    try:
        yield clock
    except TimeUp:
        raise _too_long(owner, seconds) from None
    except TimeoutError:
        if clock._timeout is not None and clock._timeout.expired():
            raise _too_long(owner, seconds) from None
        raise
    finally:
        clock.stop()
        _clock.reset(before)


@types.coroutine
def _in_stretches(work: Coroutine[Any, Any, T], seconds: float) -> Generator[Any, Any, T]:
    """Drive a coroutine; what it computes between two awaits is under the alarm."""
    send: Callable[[Any], Any] = work.send
    value: Any = None
    while True:
        with alarm(seconds):
            try:
                waits_for = send(value)
            except StopIteration as done:
                result: T = done.value
                return result
        try:
            send, value = work.send, (yield waits_for)
        except BaseException as error:  # for the coroutine, as `yield from` would do
            send, value = work.throw, error


def _ours(owner: object) -> bool:
    return type(owner).__module__.partition(".")[0] == "upshot"


def _too_long(owner: object, seconds: float) -> CallTimeout:
    return CallTimeout(
        f"{getattr(owner, '__name__', type(owner).__name__)} took more than {seconds:g} s (call_seconds)"
    )
