"""Variables from a `.env` file in the working folder: keys of providers, CollabLLM's end signal and the like."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

_LINE = re.compile(
    r"""\s*(?:export\s+)?(?P<name>[A-Za-z_]\w*)\s*=\s*
    (?:"(?P<double>(?:\\.|[^"\\])*)"|'(?P<single>[^']*)'|(?P<bare>.*?))\s*(?:\#.*)?""",
    re.VERBOSE,
)


def load_environment(folder: Path | None = None) -> None:
    """Set what the folder's `.env` says, unless it is set already: the shell has the last word."""
    file = (folder or Path.cwd()) / ".env"
    if file.is_file():
        for name, value in variables(file.read_text(encoding="utf-8", errors="replace")):
            os.environ.setdefault(name, value)


def variables(text: str) -> Iterator[tuple[str, str]]:
    """Names and values of `NAME=value` lines; `export`, quotes and comments as a shell has them."""
    for line in text.splitlines():
        found = _LINE.fullmatch(line)
        if found is None:
            continue
        if found["double"] is not None:
            yield found["name"], re.sub(r"\\(.)", lambda m: {"n": "\n", "t": "\t"}.get(m[1], m[1]), found["double"])
        else:
            yield found["name"], found["single"] if found["single"] is not None else found["bare"]
