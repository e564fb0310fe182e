"""Errors that the user can fix (one clear line, exit code 2, no traceback), and closing several things despite
errors."""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Iterable
from contextlib import AsyncExitStack
from difflib import get_close_matches
from typing import Any, Protocol


class UserError(Exception):
    """Something in the input is wrong; the message names the thing, the value and the way out."""

    excerpt: str = ""
    """Lines of the input, shown below the message with a caret under the error."""


class BudgetExceeded(UserError):
    """A call, token or spend budget ran out; finished work is saved and the run can be resumed."""


def import_optional(module: str, sentence: str) -> Any:
    """A library that not everybody has; `UserError` with the sentence, which says how to get it, where it is absent."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"{sentence}; {error}") from error


def near(word: str, known: Iterable[str]) -> str:
    """The known word that is most similar; empty if none is similar."""
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
        return next((inner for part in error.exceptions if (inner := user_error_in(part))), None)
    return None


def reason_of(error: BaseException) -> str:
    """Why something failed: the `UserError` inside an exception, else the exception's own message."""
    return str(user_error_in(error) or error) or type(error).__name__


class Closable(Protocol):
    """What holds connections, processes or memory."""

    def aclose(self) -> Awaitable[None]:
        """Release them."""


async def close_all(things: Iterable[Closable | None]) -> None:
    """Close everything in order, even if one of them raises; errors are raised after all were closed."""
    async with AsyncExitStack() as stack:
        for thing in reversed([thing for thing in things if thing is not None]):
            stack.push_async_callback(thing.aclose)
