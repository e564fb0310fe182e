"""Files that are there entirely or not at all, after a power cut as well."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from upshot.jsonl import plain


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file, whatever the value holds."""
    write_whole(path, json.dumps(plain(value)).encode())


def write_whole(path: Path, content: bytes) -> None:
    """Write a file."""
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
