"""Errors that the user can fix (one clear line, exit code 2, no traceback), and closing in spite of errors."""

from __future__ import annotations

from collections.abc import Awaitable, Iterable
from contextlib import AsyncExitStack
from difflib import get_close_matches
from typing import Protocol


class UserError(Exception):
    """Something in the input is wrong; the message names the thing, the value and the way out."""

    excerpt: str = ""
    """Lines of the input that are shown below the message as they stand, a caret under the place."""


class BudgetExceeded(UserError):
    """A call, token or spend budget ran out; finished work is saved and the run can be resumed."""


def near(word: str, known: Iterable[str]) -> str:
    """The known word that another one is most like; empty where it is like none."""
    return next(iter(get_close_matches(word, sorted(known), n=1, cutoff=0.6)), "")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The tail of an error message: the nearest known word, or the list of all of them."""
    known = sorted(known)
    if nearest := near(word, known):
        return f"did you mean '{nearest}'?"
    return f"known: {', '.join(known)}" if known else "none are known"


def user_error_in(error: BaseException) -> UserError | None:
    """The user error inside an exception or exception group, if there is one."""
    if isinstance(error, UserError):
        return error
    if isinstance(error, BaseExceptionGroup):
        return next((found for part in error.exceptions if (found := user_error_in(part))), None)
    return None


def reason_of(error: BaseException) -> str:
    """Why something ended: the user's error where an exception holds one, else its own message."""
    return str(user_error_in(error) or error) or type(error).__name__


class Closable(Protocol):
    """What holds connections, processes or memory."""

    def aclose(self) -> Awaitable[None]:
        """Release them."""


async def close_all(things: Iterable[Closable | None]) -> None:
    """Close everything, in order, whatever one of them does; what failed is raised when all had their turn."""
    async with AsyncExitStack() as stack:
        for thing in reversed([thing for thing in things if thing is not None]):
            stack.push_async_callback(thing.aclose)
