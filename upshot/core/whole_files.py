"""Files that are there entirely or not at all, after a power cut as well; and texts that somebody else wrote."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from upshot.core.errors import UserError
from upshot.core.jsonl import plain


def read_text(path: Path, what: str = "file") -> str:
    """The text of a file that somebody gave us; one that cannot be read, or is not UTF-8, is a `UserError`."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{what} '{path}' is not UTF-8 (byte {error.start}); save it as UTF-8") from None
    except OSError as error:
        raise UserError(f"cannot read {what} '{path}': {(error.strerror or str(error)).lower()}") from None


def check_writable(path: Path, option: str = "--out") -> None:
    """Refuse, before the work, a file that could not be written after it. Its folder is made."""
    probe = path.with_name(f".{path.name}.probe")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(None, "is a directory")
        if path.exists():
            path.open("ab").close()
        probe.touch()
        probe.unlink()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UserError(f"cannot write '{path}': {reason}; choose another {option}") from None


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


def fill(folder: Path, write: Callable[[Path], None]) -> None:
    """Make a folder, have it filled, and wait until its files are on the disk."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write(folder)
    sync(*(path for path in folder.rglob("*")), folder)


def place(partial: Path, final: Path) -> None:
    """Give a filled folder its name; what lay there before was not whole."""
    shutil.rmtree(final, ignore_errors=True)
    os.replace(partial, final)
    sync(final.parent)
