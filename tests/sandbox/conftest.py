"""One sandbox for a whole module: an event loop in a thread, so that tests stay plain functions."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

import pytest

from tests.patience import patience, slower, wait_until
from upshot.core.errors import UserError
from upshot.sandbox import Limits, Sandbox

T = TypeVar("T")
QUICK = Limits(cpu_seconds=1.5 * slower(), wall_seconds=patience(6), memory_mb=256, output_kb=256)
"""Ten times what an honest program of these tests needs: under load, a second of CPU does a third of the work."""


class Box:
    """A sandbox and its event loop."""

    def __init__(self, **options: Any) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.sandbox = Sandbox(**{"slots": 2, "limits": QUICK, **options})

    def __call__(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def close(self) -> None:
        self(self.sandbox.aclose())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    def strangers(self) -> list[str]:
        """Processes of programs that are still alive: those with a slot's user id."""
        base = self.sandbox.layers.uid_base if self.sandbox.layers else None
        if base is None:
            return []
        found = []
        for entry in os.listdir("/proc"):
            try:
                if entry.isdigit() and base <= os.stat(f"/proc/{entry}").st_uid < base + 1000:
                    found.append(entry)
            except FileNotFoundError:
                continue
        return found


def soon(condition: Callable[[], Any], seconds: float = 10.0) -> bool:
    """Whether a condition becomes true."""
    return bool(wait_until(condition, seconds, 0.05))


def make_box(**options: Any) -> Box:
    """A box, or a skip with the reason if this machine lacks a layer."""
    box = Box(**options)
    try:
        box(box.sandbox.start())
    except UserError as error:
        box.close()
        pytest.skip(str(error))
    return box


@pytest.fixture(scope="module")
def box() -> Iterator[Box]:
    made = make_box()
    yield made
    made.close()
