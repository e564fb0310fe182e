"""A time limit for user code: a metric, participant, environment or verifier that is not part of Upshot.

When the time is up, awaited work is cancelled. Code that computes without awaiting would block everything else, so an
alarm interrupts it: in the main thread a signal, in any other thread an exception that a second thread raises there
(signals reach only the main thread, and `upshot.reward` in a notebook runs in its own thread). Both end a loop of
Python code; the signal also ends `time.sleep` and other system calls.

Two things cannot be interrupted: a call inside a C library that does not return to Python, and code that catches
every exception. Time that Upshot itself spends on behalf of that code (helper models, sandbox, worker processes, which
have their own limits) and time at a `breakpoint()` do not count.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import inspect
import logging
import signal
import sys
import threading
import time
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from traceback import walk_stack
from typing import Any, ParamSpec, TypeVar, cast

log = logging.getLogger(__name__)

T = TypeVar("T")
P = ParamSpec("P")

call_seconds: ContextVar[float] = ContextVar("call_seconds", default=120.0)
"""The limit of one call; a run sets it from its recipe."""
OURS = "upshot."
"""What is defined in modules named so has no limit."""
LATE_S = 1.0
"""A timer this late means that the whole program was suspended; the call then gets its time again."""
AGAIN_S = 1.0
"""Seconds after which the alarm is repeated, for code that caught the first one."""

_clock: ContextVar[_Clock | None] = ContextVar("_clock", default=None)


class CallTimeout(Exception):
    """A call to user code took longer than its limit."""

    reason = "timeout"


async def limit_call(owner: object, method: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a method of `owner`; `CallTimeout` if `owner` is user code and takes too long.

    The method may also be a plain function: it is called directly, and everything else waits for it.
    """
    if type(owner).__module__.startswith(OURS):
        return await method(*args, **kwargs)
    work: Any = limit_call_now(owner, method, *args, **kwargs)
    if not asyncio.iscoroutine(work):
        return cast(T, await work if inspect.isawaitable(work) else work)
    seconds = call_seconds.get()
    timeout = asyncio.timeout(None)
    clock = _Clock(seconds, timeout)
    before = _clock.set(clock)
    try:
        async with timeout:
            return cast(T, await _in_stretches(work, seconds))
    except TimeUp:
        raise _too_long(owner, seconds) from None
    except SystemExit as error:  # ends its own call, not the run
        raise RuntimeError(f"sys.exit({error.code}) was called").with_traceback(error.__traceback__) from None
    except TimeoutError:
        if timeout.expired():
            raise _too_long(owner, seconds) from None
        raise
    finally:
        clock.stop()
        _clock.reset(before)


def limit_call_now(owner: object, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The same for a plain function."""
    if type(owner).__module__.startswith(OURS):
        return work(*args, **kwargs)
    seconds = call_seconds.get()
    try:
        with alarm(seconds):
            return work(*args, **kwargs)
    except TimeUp:
        raise _too_long(owner, seconds) from None
    except SystemExit as error:  # ends its own call, not the run
        raise RuntimeError(f"sys.exit({error.code}) was called").with_traceback(error.__traceback__) from None


def pause_clock(work: Callable[P, Awaitable[T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Decorator for functions with their own limit: the caller's clock is paused while they run."""

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
    """Counts down the seconds of one call, except while it is paused."""

    def __init__(self, seconds: float, timeout: asyncio.Timeout) -> None:
        self.seconds = self._left = seconds
        self._holds = 0
        self._timeout: asyncio.Timeout | None = timeout
        """What ends the call; None when it is over."""
        self._timer: asyncio.TimerHandle | None = None
        self._run()

    def hold(self) -> None:
        self._holds += 1  # calls that have a limit of their own may be nested, or run side by side
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
        if now - self._due > LATE_S:  # the loop stood still: a suspended machine, or a person at a breakpoint
            self._left = self.seconds
            self._run()
        elif self._timeout is not None:
            self._timeout.reschedule(now)


@types.coroutine
def _in_stretches(work: Coroutine[Any, Any, T], seconds: float) -> Generator[Any, Any, T]:
    """Drive a coroutine; the code between two awaits runs under the alarm.

    asyncio's own timeout ends what awaits, but it needs the event loop, which stands still while code computes. The
    alarm needs no loop. It may not ring while the coroutine waits: other code runs then, in the same thread.
    """
    send: Callable[[Any], Any] = work.send
    value: Any = None
    while True:
        with alarm(seconds):
            try:
                waits_for = send(value)
            except StopIteration as done:
                return cast(T, done.value)
        try:
            send, value = work.send, (yield waits_for)
        except BaseException as error:  # for the coroutine, as `yield from` would do
            send, value = work.throw, error


def _too_long(owner: object, seconds: float) -> CallTimeout:
    name = getattr(owner, "__name__", type(owner).__name__)
    return CallTimeout(f"{name} took more than {seconds:g} s (call_seconds)")


class TimeUp(BaseException):
    """The alarm as the interrupted code sees it; `except Exception` does not catch it."""


@contextmanager
def alarm(seconds: float) -> Iterator[None]:
    """Raise `TimeUp` in the enclosed code after this many seconds; an outer alarm continues afterwards."""
    by_signal = hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()
    with _signal_alarm(seconds) if by_signal else _thread_alarm(seconds):
        yield


@contextmanager
def _signal_alarm(seconds: float) -> Iterator[None]:
    began = time.monotonic()
    handler = signal.signal(signal.SIGALRM, _on_signal)
    theirs, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler if handler is not None else signal.SIG_DFL)
        if theirs:
            signal.setitimer(signal.ITIMER_REAL, max(theirs - (time.monotonic() - began), 1e-3), interval)


def _on_signal(_signal: int, _frame: types.FrameType | None) -> None:
    # Set again each time instead of using an interval: a slow, traced step would be interrupted forever.
    signal.setitimer(signal.ITIMER_REAL, AGAIN_S)
    if sys.gettrace() is None:  # a person at a breakpoint may take as long as they like
        raise TimeUp


_innermost: dict[int, _Ringer] = {}
"""The active alarm of each thread: an outer alarm waits until the inner one is over."""


@contextmanager
def _thread_alarm(seconds: float) -> Iterator[None]:
    me = threading.get_ident()
    outer, ringer = _innermost.get(me), _Ringer(me, seconds)
    try:
        _innermost[me] = ringer
        ringer.start()
        yield
    finally:
        while True:  # the alarm may be raised in this very block: then try again
            try:
                ringer.stop()
                if outer is None:
                    _innermost.pop(me, None)
                else:
                    _innermost[me] = outer
                break
            except TimeUp:
                continue


class _Ringer(threading.Thread):
    """Raises `TimeUp` in the thread that made it when its time is up, repeatedly until it is stopped.

    One thread per alarm costs about 0.1 ms. A single thread for all alarms would need a queue, and an exception that
    arrives in the middle of a queue operation would corrupt it.
    """

    def __init__(self, target: int, seconds: float) -> None:
        super().__init__(name="upshot-alarm", daemon=True)
        self._target_thread, self._seconds = target, seconds
        self._over = threading.Event()
        self._ringing = threading.Lock()
        self._rang = False

    def run(self) -> None:
        wait = self._seconds
        while not self._over.wait(wait):
            wait = AGAIN_S
            with self._ringing:
                mine = _innermost.get(self._target_thread) is self and not _at_breakpoint(self._target_thread)
                if not mine or self._over.is_set():
                    continue
                if self._rang:
                    log.warning(
                        "a call in a thread exceeds its time limit and cannot be interrupted: it does not return to "
                        "Python, or catches every exception; in the main thread it could be"
                    )
                self._rang = True
                target = ctypes.c_ulong(self._target_thread)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(target, ctypes.py_object(TimeUp))

    def stop(self) -> None:
        """Stop the alarm; if one is already on its way to this thread, receive it here.

        It is not cancelled (SetAsyncExc with NULL): CPython 3.11 would then keep checking for it forever, and a traced
        step in a debugger would never end.
        """
        with self._ringing:
            self._over.set()
        if self._rang:
            with suppress(TimeUp):
                for _ in range(100):  # it arrives at the next backward jump
                    pass


def _at_breakpoint(thread: int) -> bool:
    innermost = sys._current_frames().get(thread)
    return innermost is not None and any(frame.f_trace is not None for frame, _ in walk_stack(innermost))
