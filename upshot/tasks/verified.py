"""Tasks whose rows come from files or the Hub and whose replies go to a verifier. Most tasks are a few lines on top."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from upshot.core.conversation import Conversation, Row
from upshot.core.errors import UserError
from upshot.core.score import Reason, Score
from upshot.tasks.base import Task
from upshot.tasks.collabllm import separate
from upshot.tasks.datasets.rows import fingerprint, has_nan_answer, row_of
from upshot.tasks.datasets.tables import read_tables
from upshot.tasks.verifiers.base import Claim, verifiers

log = logging.getLogger(__name__)


class VerifiedTask(Task):
    """Rows by split, a prompt, a verifier."""

    verifier = ""
    """The verifier of rows that name none."""
    hub: str = ""
    """Hugging Face name, with @config where it has several; '' when the task has no set of its own."""
    instructions = ""
    """Put behind a bare question: how to answer."""

    def __init__(
        self,
        file: str | None = None,
        train_file: str | None = None,
        validation_file: str | None = None,
        test_file: str | None = None,
        held_out: float = 0.1,
        limit: int | None = None,
        split_seed: int = 0,
        instructions: str | None = None,
        system: str = "",
    ) -> None:
        """Make the task.

        file: a .jsonl, .parquet, .json or .csv file, a folder, or a Hub name with all splits.
        train_file, validation_file, test_file: one source for each instead.
        held_out: share of the questions that validation and test each get of a source without splits.
        limit: at most so many rows a split. instructions: how to answer, instead of the task's own words.
        """
        named = {"train": train_file, "validation": validation_file, "test": test_file}
        self._named = {split: source for split, source in named.items() if source}
        self._file = file or (None if self._named else self.hub)
        self.held_out = held_out
        self.limit = limit
        self.split_seed = split_seed
        self.system = system
        if instructions is not None:
            self.instructions = instructions

    @property
    def verifier_options(self) -> dict[str, Any]:
        """Constructor options of the verifier."""
        return {}

    def rows(self, split: str) -> Sequence[Row]:
        """The rows of a split."""
        if split not in self._splits:
            raise UserError(f"task '{self.name}' has no split '{split}'; it has {', '.join(self._splits)}")
        return self._splits[split][: self.limit]

    @cached_property
    def _splits(self) -> dict[str, list[Row]]:
        tables = self._tables()
        rows = {split: [self.parse(record) for record in records] for split, records in tables.items()}
        for split, parsed in rows.items():
            self._warn(split, tables[split], parsed)
        return separate(rows, self.held_out, self.split_seed)

    def _warn(self, split: str, records: Sequence[Mapping[str, Any]], rows: Sequence[Row]) -> None:
        """Say what is odd about the rows and would otherwise only show in the results."""
        again = len(rows) - len({(fingerprint(row.messages), repr(row.reference)) for row in rows})
        where = f"task '{self.name}', {split}"
        if again:
            log.warning("%s: %d of %d rows say the same as another one; they are kept", where, again, len(rows))
        if wanting := sum(map(has_nan_answer, records)):
            log.warning("%s: the answer of %d of %d rows is NaN; their scores are missing", where, wanting, len(rows))

    def _tables(self) -> dict[str, list[dict[str, Any]]]:
        """The raw records by split."""
        if not self._file and not self._named:
            raise UserError(f"task '{self.name}' needs the option 'file' (.jsonl, .parquet, a folder or a Hub name)")
        tables = read_tables(self._file) if self._file else {}
        for split, source in self._named.items():
            tables[split] = [record for table in read_tables(source).values() for record in table]
        return tables

    def parse(self, record: Mapping[str, Any]) -> Row:
        """A record as a row of this task."""
        return row_of(record, self.verifier, self.instructions, self.system)

    def response(self, conversation: Conversation) -> str | None:
        """What is verified: the assistant's last words; None when it said nothing."""
        for turn in reversed(conversation.turns[len(conversation.row.messages) :]):
            if turn.message.role == "assistant":
                return turn.message.content
        return None

    def claim(self, conversation: Conversation) -> Claim | None:
        """The last reply against the row's reference."""
        response = self.response(conversation)
        if response is None:
            return None
        row = conversation.row
        source = row.source or self.verifier
        options = self.verifier_options if source == self.verifier else {}
        return Claim(source, response, row.reference, row.meta, options)

    async def verify(self, conversation: Conversation) -> Score:
        """The verdict, found in this process; a recipe's reward manager is asked instead where there is one."""
        claim = self.claim(conversation)
        if claim is None:
            return Score.missing(Reason.NOTHING_SAID, "no reply to verify")
        verifier = verifiers.create(claim.source, claim.options, where="the row's source")
        return await verifier.verify(claim.response, claim.reference, claim.extra)

    def groups(self, row: Row) -> Mapping[str, str]:
        """Task, and difficulty where the row says it."""
        level = next((row.meta[key] for key in ("difficulty", "level") if row.meta.get(key)), None)
        return {"task": row.source or self.name} | ({"difficulty": str(level)} if level else {})
