"""The table of what is called what (`table.yaml`): looked up, and printed as docs/migrate.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import yaml


@dataclass(frozen=True)
class MappingLine:
    """One thing of an original and what it is here: a recipe key, a command, a metric, or a reason why not."""

    theirs: str
    kind: str
    key: str = ""
    how: str = ""
    """The conversion of its value; '' takes it as it is."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """What each of its values is here, where they are words."""
    command: str = ""
    metric: str = ""
    reason: str = ""
    note: str = ""


@dataclass(frozen=True)
class Original:
    """One of the originals with its lines."""

    title: str
    origin: str
    lines: tuple[MappingLine, ...]

    def find(self, name: str, kinds: Sequence[str] = ("flag", "key")) -> MappingLine | None:
        """The line of a flag or key: its own, else the longest pattern that fits."""
        fits = [line for line in self.lines if line.kind in kinds and fnmatchcase(name, line.theirs)]
        return max(fits, key=lambda line: (line.theirs == name, len(line.theirs)), default=None)


@cache
def read_table() -> tuple[str, dict[str, Original]]:
    """The head of the page, and all originals by name."""
    loaded = yaml.safe_load((Path(__file__).parent / "table.yaml").read_text(encoding="utf-8"))
    head = str(loaded.pop("head"))
    return head, {
        name: Original(about["title"], about["origin"], tuple(MappingLine(**row) for row in about["rows"]))
        for name, about in loaded.items()
    }


def originals() -> dict[str, Original]:
    """All originals by name."""
    return read_table()[1]


def page() -> str:
    """docs/migrate.md."""
    parts = [read_table()[0]]
    for original in originals().values():
        parts += [f"## {original.title}\n\n{original.origin}\n", "| | theirs | ours | |\n|---|---|---|---|"]
        for line in original.lines:
            own = f"*on purpose not*: {line.reason}" if line.reason else f"`{line.key or line.command or line.metric}`"
            parts[-1] += f"\n| {line.kind} | `{line.theirs}` | {own} | {line.note} |"
        parts[-1] += "\n"
    return "\n".join(parts)


if __name__ == "__main__":
    print(page(), end="")
