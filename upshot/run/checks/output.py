"""Where the run is written: a folder that is free and can be made."""

from __future__ import annotations

import os
from collections.abc import Iterator

from upshot.run.checks.context import CheckContext, Finding
from upshot.run.folder import RunFolder, cannot_write, place_of


def check(context: CheckContext) -> Iterator[Finding]:
    """Look at the folder; nothing is made."""
    if context.resumed:
        return
    path = place_of(context.recipe)
    RunFolder(path).check_free()
    above = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not above.is_dir():
        yield Finding(cannot_write(path, f"'{above}' is not a folder"))
    elif not os.access(above, os.W_OK | os.X_OK):
        yield Finding(cannot_write(path, f"'{above}' is read-only for you"))
