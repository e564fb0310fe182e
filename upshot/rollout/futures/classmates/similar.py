"""Other questions for a thought to help with: any other of the task, or one that is alike."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from upshot.core.conversation import Message, Row, derive_seed
from upshot.core.errors import UserError
from upshot.tasks.base import Task

NEAREST = 8
"""A similar question is drawn from this many nearest ones."""
_WORD = re.compile(r"\w+")
BEFORE_ANOTHER = """\
Here is how somebody thought about a question.

[Question]
{question}

[Thought]
{thought}

Now answer another question.

{other}"""


class OtherQuestions:
    """Pairs every row with another one of the task's training split: all replies to a row are asked the same."""

    def __init__(self, task: Task, seed: int, similar_by: str = "") -> None:
        self.task = task
        self.seed = seed
        """The run's: which one it is depends on the row alone, so that the replies of a group can be compared."""
        self.similar_by = similar_by
        """'': any other row. words: among the nearest by tf-idf. key: with the same `Task.similar_key`."""
        self._near: dict[str, list[int]] = {}

    def row(self, first: Row) -> Row:
        """The row that is paired with this one."""
        rows = self.rows
        others = [index for index in range(len(rows)) if rows[index].id != first.id]
        if not others:
            raise UserError(f"task '{self.task.name}' has one row; another question needs a second row")
        if self.similar_by == "key":
            key = self.task.similar_key(first)
            others = [index for index in others if self.keys[index] == key] or others
        elif self.similar_by:
            if first.id not in self._near:
                self._near[first.id] = self._nearest(first)
            others = self._near[first.id] or others
        return rows[others[derive_seed(self.seed, "other", first.id) % len(others)]]

    @cached_property
    def keys(self) -> list[str]:
        """The task's key of each row."""
        return [self.task.similar_key(row) for row in self.rows]

    @cached_property
    def rows(self) -> list[Row]:
        """The rows to draw from."""
        return list(self.task.rows("train"))

    def _nearest(self, row: Row) -> list[int]:
        """The rows whose questions share the most telling words: cosine of tf-idf vectors."""
        vector = self._vector(_words(row))
        closeness: Counter[int] = Counter()
        for word, weight in vector.items():
            for index, other in self._postings.get(word, ()):
                closeness[index] += weight * other  # type: ignore[assignment]
        ranked = sorted(closeness, key=lambda index: (-closeness[index], index))
        return [index for index in ranked if self.rows[index].id != row.id][:NEAREST]

    @cached_property
    def _postings(self) -> dict[str, list[tuple[int, float]]]:
        out: dict[str, list[tuple[int, float]]] = {}
        for index, row in enumerate(self.rows):
            for word, weight in self._vector(_words(row)).items():
                out.setdefault(word, []).append((index, weight))
        return out

    @cached_property
    def _rarity(self) -> dict[str, float]:
        seen: Counter[str] = Counter(word for row in self.rows for word in _words(row))
        return {word: math.log(len(self.rows) / count) + 1e-9 for word, count in seen.items()}

    def _vector(self, words: Counter[str]) -> dict[str, float]:
        raw = {word: count * self._rarity.get(word, 0.0) for word, count in words.items()}
        norm = math.sqrt(sum(value * value for value in raw.values())) or 1.0
        return {word: value / norm for word, value in raw.items() if value > 0}


def before_another(question: Sequence[Message], thought: str, other: Sequence[Message]) -> list[Message]:
    """Another question, with the thought about the first one shown before it."""
    asked = "\n\n".join(message.content for message in question if message.role == "user")
    *before, last = other
    text = BEFORE_ANOTHER.format(question=asked, thought=thought, other=last.content)
    return [*before, replace(last, content=text)]


def _words(row: Row) -> Counter[str]:
    text = " ".join(message.content for message in row.messages if message.role == "user")
    return Counter(word.lower() for word in _WORD.findall(text))
