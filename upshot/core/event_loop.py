"""Runs many coroutines at once, inside or outside of an event loop, and measures where their time goes. No torch.

`run_anywhere` also works in a notebook, where an event loop is already running.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from typing import Any, TypeVar

T = TypeVar("T")


async def gather(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of coroutines that run concurrently; if one fails, the others are cancelled."""
    async with asyncio.TaskGroup() as tasks:
        begun = [tasks.create_task(work) for work in works]
    return [task.result() for task in begun]


def run_anywhere(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, inside or outside of an event loop."""
    return anywhere(lambda: asyncio.run(work))


def anywhere(work: Callable[[], T]) -> T:
    """Call a function that starts an event loop; in a separate thread if this one already runs a loop (a notebook)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return work()
    thread = ThreadPoolExecutor(1, "upshot")
    try:
        return thread.submit(copy_context().run, work).result()  # so the caller's time limit applies in the thread, too
    finally:
        thread.shutdown(wait=False)  # interrupting a notebook cell does not wait for it


class Stopwatch:
    """Divides time among the kinds of work in progress: of a second with three futures and one judge, the judge gets a
    quarter.

    So the parts add up to the time in which anything was in progress, however much of it was concurrent.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._clock = clock
        self._working: Counter[str] = Counter()
        self._since = clock()

    @contextmanager
    def running(self) -> Iterator[Stopwatch]:
        """Inside, work marked by `at_work`, in this task and those it starts, is counted here."""
        token = _watch.set(self)
        try:
            yield self
        finally:
            _watch.reset(token)

    def change(self, name: str, by: int) -> None:
        """From now on, one more or one fewer of a kind is in progress."""
        now, all_of_them = self._clock(), self._working.total()
        for other, count in self._working.items() if all_of_them else ():
            self.seconds[other] += (now - self._since) * count / all_of_them
        self._since = now
        self._working[name] += by


_watch: ContextVar[Stopwatch | None] = ContextVar("stopwatch", default=None)


@contextmanager
def at_work(name: str) -> Iterator[None]:
    """Inside, this task works on the named kind; without an active stopwatch nothing is counted."""
    watch = _watch.get()
    if watch is None:
        yield
        return
    watch.change(name, 1)
    try:
        yield
    finally:
        watch.change(name, -1)
