"""Lines of JSON objects: the one way in which this house reads and writes them.

A line ends with a line feed and with nothing else: what people and models write holds U+2028, U+0085 and other marks
that `str.splitlines` takes for ends. A last line without its line feed counts when it is a whole object; else it is
torn, as a killed process leaves it: no reader returns it, and the next writer cuts it off.

What is written always can be: numbers of numpy, lone surrogates, NaN (null) and objects of any kind (their text).
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from upshot.core.errors import UserError

log = logging.getLogger(__name__)

Row = dict[str, Any]
DEPTH = 50
"""What is nested deeper is written as text."""
LARGE_BITS = 10_000
"""Python writes no longer integers as decimals."""


@dataclass(frozen=True, slots=True)
class JsonLine:
    """A line of a file that is not blank."""

    number: int
    """From 1."""
    offset: int
    """In bytes."""
    data: bytes
    row: Row | None
    """Its object; None when it holds none."""

    @property
    def torn(self) -> bool:
        """Whether it is the last line, cut short."""
        return self.row is None and not self.data.endswith(b"\n")


def lines(file: IO[bytes]) -> Iterator[JsonLine]:
    """The lines of a file that was opened as bytes."""
    offset = 0
    for number, data in enumerate(file, 1):  # a file of bytes knows the line feed only
        if data.strip():
            yield JsonLine(number, offset, data, parse(data))
        offset += len(data)


def parse(data: bytes) -> Row | None:
    """The object of a line; None when there is none."""
    try:
        row = json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def read(path: Path) -> list[Row]:
    """The objects of a file of ours; damaged lines are left out, with a warning where it is not the torn last one."""
    if not path.is_file():
        return []
    with path.open("rb") as file:
        return [line.row for line in _whole(file, path) if line.row is not None]


def read_data(file: IO[bytes], name: str) -> Iterator[Row]:
    """The objects of a file that somebody gave us, all of them; `UserError` for a line that holds none."""
    for line in lines(file):
        if line.row is None:
            start = line.data[:60].decode(errors="replace").strip()
            raise UserError(f"{name}, line {line.number} {_fault(line.data)}: {start!r}")
        yield line.row


def _fault(data: bytes) -> str:
    try:
        data.decode()
    except UnicodeDecodeError:
        return "is not UTF-8; save the file as UTF-8"
    return "is not JSON, or not an object"


def append(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Add lines to a file, in one piece; a torn last line of it goes first."""
    data = b"".join(map(dumps, rows))
    mend(path)
    with path.open("ab") as file:
        file.write(data)


def write(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Make a file of just these lines."""
    with path.open("wb") as file:
        file.writelines(map(dumps, rows))


def keep(path: Path, wanted: Callable[[Row], bool]) -> None:
    """Take out of a file what is not wanted, in one step: a reader sees the old content or the new."""
    if not path.is_file():
        return
    other = path.with_name(f"{path.name}.partial")
    with path.open("rb") as old, other.open("wb") as new:
        kept = (line.data for line in _whole(old, path) if line.row is not None and wanted(line.row))
        new.writelines(data if data.endswith(b"\n") else data + b"\n" for data in kept)
        new.flush()
        os.fsync(new.fileno())
    os.replace(other, path)


def mend(path: Path) -> None:
    """Have a file end with a whole line: a last one without its line feed gets it, a torn one goes."""
    if not path.is_file():
        return
    with path.open("r+b") as file:
        start, tail = _tail(file)
        if not tail:
            return
        if parse(tail) is not None:
            file.seek(0, os.SEEK_END)
            file.write(b"\n")
        else:
            file.truncate(start)


def dumps(row: Mapping[str, Any]) -> bytes:
    """The line of an object, with its line feed."""
    try:
        text = json.dumps(row, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        text = json.dumps(plain(row), ensure_ascii=False)
    # A lone surrogate has no UTF-8; written as a backslash and its number it is the JSON escape of the same character.
    return text.encode("utf-8", "backslashreplace") + b"\n"


def _whole(file: IO[bytes], path: Path) -> Iterator[JsonLine]:
    for line in lines(file):
        if line.row is not None:
            yield line
        elif not line.torn:
            log.warning("%s: line %d is damaged and left out", path, line.number)


def _tail(file: IO[bytes], step: int = 1 << 16) -> tuple[int, bytes]:
    """What follows the last line feed of a file, and where it begins."""
    place = file.seek(0, os.SEEK_END)
    tail = b""
    while place and b"\n" not in tail:
        size = min(step, place)
        place = file.seek(place - size)
        tail = file.read(size) + tail
    cut = tail.rfind(b"\n") + 1
    return place + cut, tail[cut:]


def plain(value: Any, above: tuple[int, ...] = ()) -> Any:
    """What JSON can hold of a value that lies inside those `above`."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return value if value.bit_length() < LARGE_BITS else hex(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if id(value) in above or len(above) > DEPTH:
        return _text(value)
    try:
        return _inside(value, (*above, id(value)))
    except Exception:  # somebody's own class
        return _text(value)


def _inside(value: Any, above: tuple[int, ...]) -> Any:
    if isinstance(value, Mapping):
        return {_text(key): plain(item, above) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item, above) for item in value]
    if callable(getattr(type(value), "tolist", None)):  # numbers and arrays of numpy and torch
        return plain(value.tolist(), above)
    return _text(value)


def _text(value: Any) -> str:
    try:
        return str(value)
    except Exception:
        return f"<{type(value).__name__}>"
