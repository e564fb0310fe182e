"""Reading `.jsonl` files that a killed run may have left half written.

A line that is no JSON object is skipped and counted, never fatal; whoever reads says on the page what was skipped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from upshot.core.files import iter_jsonl


@dataclass(slots=True)
class SkippedLines:
    """Lines that could not be read: their numbers (from 1), and whether the last line was cut short."""

    lines: list[int] = field(default_factory=list)
    cut: bool = False

    def sentence(self, name: str) -> str | None:
        """What was skipped, for the reader; None when nothing was."""
        said = []
        if self.lines:
            where = ", ".join(str(number) for number in self.lines[:5]) + (", …" if len(self.lines) > 5 else "")
            said.append(f"{len(self.lines)} unreadable line{'s' * (len(self.lines) > 1)} skipped (line {where})")
        if self.cut:
            said.append("the last line is incomplete (the run was killed, or is still writing) and was skipped")
        return f"{name}: {'; '.join(said)}." if said else None


def read_objects(path: Path, skipped: SkippedLines) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Byte offset, byte length and object of every readable line; the others go into `skipped`."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for line in iter_jsonl(file):
            if line.row is not None:
                yield line.offset, len(line.data), line.row
            elif line.torn:
                skipped.cut = True
            else:
                skipped.lines.append(line.number)


def number(value: Any) -> float | None:
    """A finite number, or None; JSON as Python writes it may hold NaN and Infinity."""
    if isinstance(value, bool):
        return float(value)
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    return None


def shorten(value: float) -> float | int:
    """Six significant digits: what a plot can show, in fewer bytes."""
    rounded = float(f"{value:.6g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded
