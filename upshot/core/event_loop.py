"""Coroutines run to their end wherever we are: in a script, or in a notebook that has an event loop of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import copy_context
from threading import Thread
from typing import Any, TypeVar

T = TypeVar("T")


def run_anywhere(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, wherever we are."""
    return anywhere(lambda: asyncio.run(work))


def anywhere(work: Callable[[], T]) -> T:
    """Do what begins an event loop, in a thread of its own where this one already runs one (a notebook)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return work()
    outcome: dict[str, Any] = {}
    context = copy_context()  # the caller's time limit holds in the thread, too

    def target() -> None:
        try:
            outcome["value"] = context.run(work)
        except BaseException as error:
            outcome["error"] = error

    thread = Thread(target=target, name="upshot")
    thread.start()
    thread.join()
    if "error" in outcome:
        raise outcome["error"]
    return outcome["value"]
