"""Tasks whose rows come from files or the Hub and whose replies go to a verifier. Most tasks are a few lines on top."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from upshot.core.conversation import Conversation, Row
from upshot.core.errors import UserError
from upshot.core.score import Score
from upshot.tasks.base import list_replies
from upshot.tasks.datasets.files import Record
from upshot.tasks.datasets.records import explain_no_answer, opening_id, row_of
from upshot.tasks.tables import TableTask
from upshot.tasks.verifiers.base import BadRow, Claim, Verifier, verifiers, verify_claim

log = logging.getLogger(__name__)


class VerifiedTask(TableTask):
    """Rows by split, a prompt, a verifier."""

    verifier = ""
    """The verifier of rows that name none."""
    verifier_options: Mapping[str, Any] = {}
    """Constructor options of that verifier."""
    verifies_all = False
    """Whether that verifier is asked for rows that name another one, too."""
    instructions = ""
    """How to answer; appended to a plain question."""
    unanswered = ""
    """What to say if no row of a split that was read has an answer."""

    def __init__(self, instructions: str | None = None, system: str = "", **table: Any) -> None:
        """Make the task.

        instructions: how to answer, instead of the task's default text. system: a system prompt.
        The other options say where rows come from: see `TableTask`.
        """
        super().__init__(**table)
        self.system = system
        if instructions is not None:
            self.instructions = instructions

    def parse_table(self, split: str, records: Sequence[Record]) -> list[Row]:
        """A row for every record; warns of oddities that would show only in the results."""
        where = f"task '{self.name}', {split}"
        rows = []
        for number, record in enumerate(records, 1):
            try:
                rows.append(self.parse(record))
            except UserError as error:
                raise UserError(f"{where}, row {number}: {error}") from error
        distinct = {(opening_id(row.messages) if row.messages else row.id, repr(row.reference)) for row in rows}
        if again := len(rows) - len(distinct):
            log.warning("%s: %d of %d rows repeat another one; they are kept", where, again, len(rows))
        wanting = sum(not has_answer(row) for row in rows)
        if wanting == len(rows) > 0:
            self.unanswered = f"{where}: {explain_no_answer(records)}"
        elif wanting:
            log.warning("%s: %d of %d rows have no answer; their scores are missing", where, wanting, len(rows))
        return rows

    def parse(self, record: Mapping[str, Any]) -> Row:
        """A record as a row of this task."""
        row = row_of(record, self.verifier, self.instructions, self.system)
        return replace(row, source=self.verifier) if self.verifies_all else row

    def response(self, conversation: Conversation) -> str | None:
        """What is verified: the assistant's last words; None when it said nothing."""
        replies = list_replies(conversation)
        return replies[-1] if replies else None

    def claim(self, conversation: Conversation) -> Claim | None:
        """The last reply against the row's reference."""
        response = self.response(conversation)
        if response is None:
            return None
        row = conversation.row
        source, options = self.verifier_of(row)
        prompt = "\n\n".join(message.content for message in row.messages)
        return Claim(source, response, row.reference, {**row.meta, "prompt": prompt}, options)

    def verifier_of(self, row: Row) -> tuple[str, Mapping[str, Any]]:
        """The name and the options of a row's verifier; data names no code, unless the task names the same."""
        source = row.source or self.verifier
        if ":" in source and source != self.verifier:
            raise UserError(
                f"row '{row.id}' names code as its source ('{source}'), but data cannot run code; "
                "if it is yours, make it the task's verifier"
            )
        return source, self.verifier_options if is_same_verifier(source, self.verifier) else {}

    async def verify(self, conversation: Conversation) -> Score:
        """The verdict, found in this process; a recipe's reward manager is asked instead where there is one."""
        return await verify_claim(self.claim(conversation))

    def groups(self, row: Row) -> Mapping[str, str]:
        """Task, and difficulty where the row says it."""
        level = next((row.meta[key] for key in ("difficulty", "level") if row.meta.get(key)), None)
        return {"task": row.source or self.name} | ({"difficulty": str(level)} if level else {})


def has_answer(row: Row) -> bool:
    """Whether a row says what its verifier compares with, in whatever column; True where that is not known."""
    kind = verifiers.get(row.source) if row.source in verifiers else None
    if row.reference in (None, "") and isinstance(kind, type) and issubclass(kind, Verifier):
        try:
            kind.ground_truth(None, row.meta)
        except BadRow:
            return False
    return True


def is_same_verifier(source: str, name: str) -> bool:
    """Whether two names are of one verifier: options belong to it, however a row's data source spells it."""
    return source == name or (
        source in verifiers and name in verifiers and verifiers.get(source) is verifiers.get(name)
    )
