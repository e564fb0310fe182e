"""Interrupts Python code that computes for too long: by a signal in the main thread, from a watchdog in any other.

A signal reaches the main thread only, and Windows has none; `upshot.reward` in a notebook runs in a thread of its own.
There a watchdog thread raises the alarm inside the thread that is late. Both end a loop of Python code; a signal also
ends `time.sleep` and other system calls, which the watchdog's alarm waits for.
"""

from __future__ import annotations

import ctypes
import logging
import queue
import signal
import sys
import threading
import time
import types
from collections.abc import Iterator
from contextlib import contextmanager, suppress

log = logging.getLogger(__name__)

AGAIN_S = 1.0
"""The alarm rings again after so many seconds, for code that caught the first one."""


class TimeUp(BaseException):
    """The alarm, as seen by the code it interrupts: no `except Exception` catches it."""


@contextmanager
def alarm(seconds: float) -> Iterator[None]:
    """Raise `TimeUp` in what runs inside after so many seconds; somebody else's alarm goes on afterwards."""
    by_signal = hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()
    with _by_signal(seconds) if by_signal else _watchdog.watching(seconds):
        yield


@contextmanager
def _by_signal(seconds: float) -> Iterator[None]:
    began = time.monotonic()
    handler = signal.signal(signal.SIGALRM, _ring)
    theirs, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler if handler is not None else signal.SIG_DFL)
        if theirs:
            signal.setitimer(signal.ITIMER_REAL, max(theirs - (time.monotonic() - began), 1e-3), interval)


def _ring(_signal: int, _frame: types.FrameType | None) -> None:
    # Set anew each time rather than by an interval: a slow, traced step would be interrupted by the next ring for ever.
    signal.setitimer(signal.ITIMER_REAL, AGAIN_S)
    if sys.gettrace() is None:  # a person at a breakpoint may take as long as they like
        raise TimeUp


class _Watchdog:
    """One thread that raises `TimeUp` in any thread whose time is up.

    The alarm may ring inside this very code, so it takes only steps that an exception cannot split: a plain lock
    entered by `with`, and a queue written in C.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._due: dict[int, float] = {}
        """When to ring, by thread."""
        self._deaf: set[int] = set()
        """Threads that were rung and have not answered."""
        self._wakes = 0.0
        """When the watchdog looks next; what is put into the queue wakes it sooner."""
        self._sooner: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @contextmanager
    def watching(self, seconds: float) -> Iterator[None]:
        """The alarm of the calling thread; an outer one goes on afterwards."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._watch, name="upshot-alarm", daemon=True)
            self._thread.start()
        me = threading.get_ident()
        outer = self._due.get(me)
        try:
            self._set(me, time.monotonic() + seconds)
            yield
        finally:
            self._end(me, outer)

    def _end(self, thread: int, outer: float | None) -> None:
        """Back to the outer alarm; one that is on its way to this thread is caught here."""
        while True:
            try:
                self._set(thread, outer)
                return
            except TimeUp:
                continue

    def _set(self, thread: int, due: float | None) -> None:
        with self._lock:
            if due is None:
                self._due.pop(thread, None)
            else:
                self._due[thread] = due
            rang = thread in self._deaf
            self._deaf.discard(thread)
        if rang:
            _let_in()
        if due is not None and due < self._wakes:
            self._sooner.put(None)

    def _watch(self) -> None:
        while True:
            with self._lock:
                now = time.monotonic()
                for thread in [thread for thread, due in self._due.items() if due <= now]:
                    self._due[thread] = now + AGAIN_S
                    self._ring(thread)
                self._wakes = min(self._due.values(), default=now + 3600.0)
            with suppress(queue.Empty):
                self._sooner.get(timeout=max(self._wakes - now, 0.0))

    def _ring(self, thread: int) -> None:
        if _at_breakpoint(thread):
            return
        if thread in self._deaf:
            log.warning(
                "a call in a thread is over its time limit and cannot be interrupted: it does not return to Python, or "
                "catches everything; in the main thread it could"
            )
        self._deaf.add(thread)
        _raise_in(thread, TimeUp)


def _raise_in(thread: int, error: type[BaseException]) -> None:
    """Have an exception raised in a thread at its next step of Python code."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))


def _let_in() -> None:
    """Take an alarm that may be on its way to this thread.

    It is not called back (SetAsyncExc with NULL): CPython 3.11 would then look for it for ever, and a traced step of a
    debugger would never end.
    """
    with suppress(TimeUp):
        for _ in range(100):  # it comes at the next jump back
            pass


def _at_breakpoint(thread: int) -> bool:
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_trace is not None:
            return True
        frame = frame.f_back
    return False


_watchdog = _Watchdog()
