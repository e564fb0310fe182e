"""Numbers that options may be, for annotations: the bounds are checked where a thing is named, as a recipe's own are.

Light on purpose: verifiers are imported by worker processes that check nothing. The docstring of a predicate is what a
user reads who breaks it.
"""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge, Gt, Le, Predicate

Count = Annotated[int, Ge(1)]
"""At least one."""
Made = Annotated[int, Ge(1), Le(1_000_000)]
"""Rows that are made up, and must all be held."""
Whole = Annotated[int, Ge(0)]
"""None or more."""
Share = Annotated[float, Ge(0), Le(1)]
"""From nothing to everything."""
Positive = Annotated[float, Gt(0)]
"""Seconds, and whatever else must be more than nothing."""
Often = Annotated[float, Ge(0), Le(0.99)]
"""How often something is done again that must come to an end."""
NonNegative = Annotated[float, Ge(0)]
"""Temperatures, costs."""


def is_said(text: str) -> bool:
    """It must not be blank."""
    return bool(text.strip())


def is_address(text: str) -> bool:
    """It should be an address, such as http://host:8000."""
    return text.startswith(("http://", "https://")) and bool(text.partition("://")[2].strip("/"))


def is_folder_name(text: str) -> bool:
    """It names a folder: it must not be blank or dots, and has no / or \\ (`run_dir` takes a path)."""
    return bool(text.strip(" .")) and not {"/", "\\"} & {*text}


Words = Annotated[str, Predicate(is_said)]
"""A text that says something."""
Address = Annotated[str, Predicate(is_address)]
"""Of an HTTP server."""
FolderName = Annotated[str, Predicate(is_folder_name)]
"""Of a single folder."""
