"""Stores the conversations of a preparation on the disk, in the order of the logs; they are read one at a time."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from upshot.core.conversation import Message
from upshot.offline.logs.read import LoggedConversation, moment_of
from upshot.tasks.datasets.splits import fingerprint, hold_out

TABLE = "CREATE TABLE talks (place, customer, said, moment, outcome, words, held, line)"


class TalkStore:
    """Logged conversations in an SQLite file."""

    def __init__(self, path: Path | str) -> None:
        self._db = sqlite3.connect(path)

    def fill(self, talks: Iterable[LoggedConversation], most: int) -> None:
        """Store these conversations and no others; if there are more than `most`, an even selection of that many."""
        self._db.execute("DROP TABLE IF EXISTS talks")
        self._db.execute(TABLE)
        with self._db:
            self._db.executemany("INSERT INTO talks VALUES (?, ?, ?, ?, ?, ?, 0, ?)", map(_row, talks))
            even = "SELECT rowid FROM talks ORDER BY rowid * 2654435761 % 4294967296 LIMIT ?"
            deleted = self._db.execute(f"DELETE FROM talks WHERE rowid NOT IN ({even})", (most,)).rowcount
        if deleted:
            self._db.execute("VACUUM")

    def hold_out(self, share: float, seed: int) -> str:
        """Hold conversations out of training, and say how they were chosen.

        By customer if there are any, else the latest conversations, else by words (the same words on the same side).
        """
        with self._db:
            ((customers, timeless, count),) = self.rows("sum(customer != ''), sum(moment IS NULL), count(*)")
            if not customers and not timeless:
                latest = "SELECT rowid FROM talks ORDER BY moment DESC, rowid DESC LIMIT ?"
                self._db.execute(f"UPDATE talks SET held = rowid IN ({latest})", (max(1, round(count * share)),))
                return "the latest"
            key = "iif(customer = '', said, customer)"
            chosen = hold_out((key for (key,) in self.rows(key)), share, seed)
            self._db.create_function("chosen", 1, lambda key: key in chosen)
            self._db.execute(f"UPDATE talks SET held = chosen({key})")
            return "by customer" if customers else "by what was said"

    def describe_repeats(self) -> list[str]:
        """How many conversations repeat another one, and how many of these disagree about its outcome: a line or none.

        All of them are kept: what is said often is trained on often.
        """
        repeated = "SELECT count(*) AS n, count(DISTINCT outcome) > 1 AS torn FROM talks GROUP BY said HAVING n > 1"
        ((more, torn),) = self._db.execute(f"SELECT sum(n - 1), sum(n * torn) FROM ({repeated})")
        disagree = f"; {torn:,} have the same words and different outcomes" if torn else ""
        return [f"{more:,} conversations repeat the words of another one{disagree}"] if more else []

    def rows(self, columns: str, where: str = "1", *values: Any) -> list[tuple[Any, ...]]:
        """Columns of conversations; `rowid` is the number by which `read` finds one."""
        return self._db.execute(f"SELECT {columns} FROM talks WHERE {where} ORDER BY rowid", values).fetchall()

    def read(self, where: str = "1", *values: Any) -> Iterator[LoggedConversation]:
        """Conversations, in the order of the logs."""
        for (line,) in self._db.execute(f"SELECT line FROM talks WHERE {where} ORDER BY rowid", values):
            data = json.loads(line)
            yield LoggedConversation(**{**data, "messages": tuple(map(Message.from_dict, data["messages"]))})


def to_dict(talk: LoggedConversation) -> dict[str, Any]:
    """A conversation as JSON data."""
    return {**vars(talk), "messages": [message.to_dict() for message in talk.messages]}


def whole(talk: LoggedConversation) -> list[Message]:
    """The messages, with the system prompt before them."""
    return [*([Message("system", talk.system)] if talk.system else []), *talk.messages]


def _row(talk: LoggedConversation) -> tuple[Any, ...]:
    texts = [message.content for message in whole(talk)]
    said = fingerprint(" ".join(message.content for message in talk.messages))
    words = sum(len(text.split()) for text in texts)
    return talk.place, talk.customer, said, moment_of(talk.time), talk.outcome, words, json.dumps(to_dict(talk))
