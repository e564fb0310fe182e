"""Which code may run. `upshot train` runs the code that its recipe names; other verbs run only code that the user names
or trusts.

A recipe names code by a path (`my_pkg.module:Thing`) or as a command (an agent program, an MCP server). `check_trust`
is called before any of it runs. From Python everything runs, since the caller has loaded the recipe.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from upshot.core.errors import UserError


class CodeNotTrusted(UserError):
    """Code that the user has neither named nor marked as trusted."""


SHIPPED = frozenset({"upshot.offline.demo.step_reader:read_steps", "upshot.tasks.withheld:asks"})
"""Our own code that shipped recipes name by its path."""
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
        f"{what} '{code}'{place} is code that comes with the recipe or the data, "
        "which only `upshot train` runs by default; read it, then add --trust"
    )
