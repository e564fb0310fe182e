"""The task of `upshot logs prepare`: prefixes of logged conversations, of all depths, split before they came here."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from upshot.core.conversation import Row
from upshot.tasks.base import tasks
from upshot.tasks.collabllm import CollabTask
from upshot.tasks.datasets.files import Record

VALIDITY = "validity.json"
"""Beside the rows: how well the simulated futures predict what really happened."""


@tasks.register("logs")
class LogsTask(CollabTask):
    """Rows of `rl_*.parquet`, whose users come from logs; its caveat on results is the validity."""

    description = "A customer talks to an assistant."

    @cached_property
    def _splits(self) -> dict[str, list[Row]]:
        """As the files have them: customers are held out, not goals, which many customers share."""
        return {split: self.parse_table(split, records) for split, records in self._tables.items()}

    def parse_table(self, split: str, records: Sequence[Record]) -> list[Row]:
        """A row of each record, also where several have the same words: common calls are trained on more often."""
        return [replace(row, id=f"{row.id}/{number}") for number, row in enumerate(self._rows(split, records))]

    def groups(self, row: Row) -> Mapping[str, str]:
        """The kind of conversation and how deep in it the reply is."""
        turn = int(row.meta.get("turn_id") or 1)
        depth = {"depth": "first reply" if turn == 1 else "later reply"}
        return depth | ({"kind": str(row.meta["kind"])} if row.meta.get("kind") else {})

    def caveat(self) -> str:
        """The validity of the simulation, in a sentence."""
        files = [Path(source).parent / VALIDITY for source in self.sources()]
        validity = next((file for file in files if file.is_file()), None)
        return str(json.loads(validity.read_text("utf-8"))["text"]) if validity else ""
