"""A bar of finished pieces of work on stderr; silent when nobody watches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(what: str, total: int, done: int, quiet: bool) -> Iterator[Callable[[], None]]:
    """The bar; call what it yields for every further finished piece. `what`: their name, in the plural."""
    if quiet or not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = [TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
    with Progress(*columns, console=Console(stderr=True)) as bar:
        job = bar.add_task("", total=total, completed=done)
        yield lambda: bar.advance(job)
