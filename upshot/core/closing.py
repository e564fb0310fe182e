"""Closing several things: all of them are closed, whatever one of them does."""

from __future__ import annotations

from collections.abc import Awaitable, Iterable
from contextlib import AsyncExitStack
from typing import Protocol


class Closable(Protocol):
    """What holds connections, processes or memory."""

    def aclose(self) -> Awaitable[None]:
        """Release them."""


async def close_all(things: Iterable[Closable | None]) -> None:
    """Close everything, in order; what failed is raised when all had their turn."""
    async with AsyncExitStack() as stack:
        for thing in reversed([thing for thing in things if thing is not None]):
            stack.push_async_callback(thing.aclose)
