"""Anything as JSON: what somebody's own metric, task or user hands over must never be what ends a run."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DEEPEST = 50
"""Levels of nesting that are written; a structure that contains itself ends here, too."""


def plain(value: Any, depth: int = 0) -> Any:
    """The value as JSON has it: numpy numbers as numbers, what is not finite as null, strangers by their repr."""
    try:
        return _plain(value, depth)
    except Exception:  # an object whose own methods raise is named by its type
        return f"<{type(value).__name__}>"


def to_line(row: Mapping[str, Any]) -> bytes:
    """A row as one line of JSONL; a lone surrogate is written as JSON's own escape of it."""
    return json.dumps(plain(row), ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file that is there entirely or not at all."""
    write_whole(path, json.dumps(plain(value)).encode())


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that is there entirely or not at all, after a power cut as well."""
    temporary = path.with_name(path.name + ".partial")
    temporary.write_bytes(content)
    sync(temporary)
    os.replace(temporary, path)


def sync(*paths: Path) -> None:
    """Wait until files and folders are on the disk."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _plain(value: Any, depth: int) -> Any:
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value) if value.bit_length() < 10_000 else hex(value)  # Python refuses to print longer ones
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if depth >= DEEPEST:
        return "…"
    if isinstance(value, Mapping):
        return {str(key): plain(item, depth + 1) for key, item in value.items()}
    if hasattr(value, "tolist"):  # numbers and arrays of numpy, tensors
        return plain(value.tolist(), depth + 1)
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item, depth + 1) for item in value]
    return repr(value)
