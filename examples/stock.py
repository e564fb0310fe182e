"""Tools from an MCP server: a clerk is asked how many things are in a bin, and only the server knows.

This file is both the server (`python examples/stock.py`) and the task with the rows, words and demonstrations that a
tiny model needs. A model that can speak needs only a recipe with `task: {name: mcp, server: …, train_file: …}`.

    upshot train examples/stock.yaml
"""

from __future__ import annotations

import random
import zlib
from typing import Any

from upshot.core.conversation import Message, Row
from upshot.tasks.environments.mcp import McpTask

BINS = [f"{letter}{number}" for letter in "abcdefgh" for number in range(8)]
HEAD, TAIL = '<tool_call>{"name":"count","arguments":{"place":', "}}</tool_call>"


def count_in(place: str) -> int:
    """What the server knows: nothing that a model could learn from a part of the bins."""
    return zlib.crc32(place.encode()) % 10


class Stock(McpTask):
    """How many are in a bin? Three of four demonstrations guess, one asks the server."""

    name = "stock"

    def __init__(self, size: int = 4000, **options: Any) -> None:
        super().__init__(**options)
        self.size = size

    def rows(self, split: str) -> list[Row]:
        """Questions; the bins of validation and test do not appear in any other split."""
        own = {"train": BINS[:48], "validation": BINS[48:56], "test": BINS[56:]}[split]
        picks = [random.Random(f"{split} {number}").choice(own) for number in range(self.size)]
        asked = [(Message("user", f"how many in {place}"),) for place in picks]
        return [Row(f"{split}/{n}", asked[n], place, str(count_in(place))) for n, place in enumerate(picks)]

    def vocabulary(self) -> list[str]:
        """Every word of this small language."""
        quoted = [f'"{place}"' for place in BINS]
        return sorted({*["how", "many", "in", "[count]", "error:"], *map(str, range(10)), *BINS, *quoted, HEAD, TAIL})

    def dialogues(self, split: str) -> list[tuple[Message, ...]]:
        """Demonstrations over all bins, so that the model learns to write every one of them."""
        out = []
        for number in range(self.size):
            rng = random.Random(f"demo {split} {number}")
            place = rng.choice(BINS)
            said = [Message("user", f"how many in {place}")]
            if rng.random() < 0.25:
                found = Message("user", f"[count] {count_in(place)}")
                said += [Message("assistant", f'{HEAD} "{place}" {TAIL}'), found]
                said += [Message("assistant", str(count_in(place)))]
            else:
                said += [Message("assistant", str(rng.randrange(10)))]
            out.append(tuple(said))
        return out


if __name__ == "__main__":
    from mcp.server import MCPServer

    server = MCPServer("stock")

    @server.tool()
    def count(place: str) -> str:
        """Count what is in a bin."""
        return str(count_in(place))

    server.run()
