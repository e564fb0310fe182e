"""Whose code runs. `upshot train` runs what its recipe brings; other verbs run only what the user names or trusts.

Code comes with a recipe as a path (`my_pkg.module:Thing`) or as a command (an agent program, an MCP server). Whoever is
about to run some asks `check_trust` first. In Python everything runs: there the caller has loaded it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from upshot.core.errors import UserError


class CodeNotTrusted(UserError):
    """Code that the user has neither named nor trusted."""


SHIPPED = frozenset({"upshot.offline.demo.step_reader:read_steps", "upshot.tasks.withheld:asks"})
"""Code of our own that shipped recipes name by its path."""
_named: Sequence[str] | None = None
"""The words of a command line that may name code; None: all code runs."""


@contextmanager
def trusting_only(words: Sequence[str] | None) -> Iterator[None]:
    """Within, run only code that stands in these words of the user's; None: all of it."""
    global _named
    before, _named = _named, words
    try:
        yield
    finally:
        _named = before


def trusts_all() -> bool:
    """Whether all code runs, so that folders may be searched for it before any is asked for."""
    return _named is None


def check_trust(code: str, what: str, where: str = "") -> None:
    """Refuse code that a recipe or run folder brings, where only the user's own words count."""
    if _named is None or code in SHIPPED or any(code in word for word in _named):
        return
    place = f" in {where}" if where else ""
    raise CodeNotTrusted(
        f"{what} '{code}'{place} is code that comes with the recipe or the data; "
        "only `upshot train` runs it without being asked to: read it, then add --trust"
    )
