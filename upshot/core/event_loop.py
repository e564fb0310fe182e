"""Coroutines run to their end: several at once, and wherever we are, be it a notebook with an event loop of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any, TypeVar

T = TypeVar("T")


async def gather(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of coroutines that run at once; one that fails cancels the others."""
    async with asyncio.TaskGroup() as tasks:
        begun = [tasks.create_task(work) for work in works]
    return [task.result() for task in begun]


def run_anywhere(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, wherever we are."""
    return anywhere(lambda: asyncio.run(work))


def anywhere(work: Callable[[], T]) -> T:
    """Do what begins an event loop, in a thread of its own where this one already runs one (a notebook)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return work()
    thread = ThreadPoolExecutor(1, "upshot")
    try:
        return thread.submit(copy_context().run, work).result()  # the caller's time limit holds in the thread, too
    finally:
        thread.shutdown(wait=False)  # who interrupts a notebook's cell does not wait for it
