"""Reading `.jsonl` files that a run is still writing, or that a killed one left half written.

A line that is not a JSON object is skipped and counted, never fatal; the page says what was skipped.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from upshot.core.files import parse_json_line


@dataclass(slots=True)
class LogTail:
    """Where a growing log has been read to. A log that was rewritten (a resumed run drops lines) is read again."""

    path: Path
    end: int = 0
    """Bytes that were read."""
    number: int = 0
    """Lines that were read."""
    file: tuple[int, int] | None = None
    """Device and inode: a rewritten log is another file."""
    skipped: list[int] = field(default_factory=list)
    """Numbers (from 1) of lines that could not be read."""
    cut: bool = False
    """Whether the last line was cut short."""

    def sentence(self) -> str | None:
        """What was skipped, for the reader; None when nothing was."""
        parts = []
        if self.skipped:
            where = ", ".join(map(str, self.skipped[:5])) + (", …" if len(self.skipped) > 5 else "")
            parts.append(f"{len(self.skipped)} unreadable line{'s' * (len(self.skipped) > 1)} skipped (line {where})")
        if self.cut:
            parts.append("the last line is incomplete (the run was killed, or is still writing) and was skipped")
        return f"{self.path.name}: {'; '.join(parts)}." if parts else None

    def is_rewritten(self) -> bool:
        """Whether what was read is no longer what the log says; from now on it is read from its beginning."""
        stat = self.path.stat() if self.path.is_file() else None
        file = (stat.st_dev, stat.st_ino) if stat else None
        again = self.file is not None and (file != self.file or stat is None or stat.st_size < self.end)
        if again:
            self.end = self.number = 0
            self.skipped, self.cut = [], False
        self.file = file
        return again

    def read(self, seconds: float = math.inf) -> Iterator[tuple[int, int, dict[str, Any]]]:
        """Byte offset, byte length and object of every readable line that is new; at most for so long."""
        if not self.path.is_file():
            return
        until = time.monotonic() + seconds
        with self.path.open("rb") as file:
            file.seek(self.end)
            for data in file:
                row = parse_json_line(data) if data.strip() else None
                self.cut = row is None and bool(data.strip()) and not data.endswith(b"\n")
                if self.cut:
                    return
                offset, self.end, self.number = self.end, self.end + len(data), self.number + 1
                if row is not None:
                    yield offset, len(data), row
                elif data.strip():
                    self.skipped.append(self.number)
                if time.monotonic() > until:
                    return


def number(value: Any) -> float | None:
    """A finite number, or None; JSON as Python writes it may hold NaN and Infinity, and integers beyond any float."""
    try:
        converted = float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        return None
    return converted if math.isfinite(converted) else None


def shorten(value: float) -> float | int:
    """Six significant digits: what a plot can show, in fewer bytes."""
    rounded = float(f"{value:.6g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded
