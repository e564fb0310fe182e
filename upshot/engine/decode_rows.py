"""The rows of a decode step: when each of them needs a look. No tensors.

Nearly every step extends the same rows by one id, and a row needs a look only where a page begins or its last id comes.
So the rows are one list, the same object while nothing changes, and a calendar says who needs a look at which step.
"""

from __future__ import annotations

from collections.abc import Iterable

from upshot.engine.sequence import Sequence


class DecodeRows:
    """Who is extended step by step; `Sequence.due` is the step of its next look, -1 while it is not among the rows."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.step = 0
        self._rows: list[Sequence] = []
        self._joined: dict[Sequence, None] = {}
        """Running, but not among the rows yet."""
        self._left: set[Sequence] = set()
        self._calendar: dict[int, list[Sequence]] = {}

    def __len__(self) -> int:
        """Entries of all kinds."""
        return len(self._rows) + len(self._joined) + len(self._left) + sum(map(len, self._calendar.values()))

    def join(self, seq: Sequence) -> None:
        """A sequence is to be extended from the next step on."""
        self._joined[seq] = None

    def leave(self, seq: Sequence) -> None:
        """A sequence is not to be extended any more."""
        if seq.due >= 0:
            seq.due = -1
            self._left.add(seq)
        self._joined.pop(seq, None)

    def look_next(self, seq: Sequence) -> None:
        """Something happened to a row's pages: look at it in the next step."""
        if 0 <= seq.due != self.step + 1:
            self._enter(seq, self.step + 1)

    def turn(self) -> list[Sequence]:
        """Begin a step: the sequences that need a look in it."""
        self.step += 1
        due = [seq for seq in self._calendar.pop(self.step, ()) if seq.due == self.step]
        due.extend(self._joined)
        return due

    def schedule_look(self, seq: Sequence) -> None:
        """The sequence takes part in this step; enter when to look again: where a page begins, or after its last id."""
        size = self.page_size
        length = seq.length
        self._enter(seq, self.step + min(size - (length - 1) % size, seq.max_length - length))

    def _enter(self, seq: Sequence, step: int) -> None:
        seq.due = step
        self._calendar.setdefault(step, []).append(seq)

    def current(self) -> list[Sequence]:
        """The rows of this step: the same list object as in the last step if no sequence joined or left."""
        if self._left or self._joined:
            left = self._left
            self._rows = [seq for seq in self._rows if seq not in left] if left else self._rows[:]
            self._rows.extend(seq for seq in self._joined if seq.due >= 0)
            self._joined.clear()
            self._left = set()
        return self._rows

    def reset(self, rows: list[Sequence], running: Iterable[Sequence]) -> None:
        """Start again: these rows take part in this step, no others of the running ones."""
        for seq in running:
            seq.due = -1
        self._rows = rows
        self._joined.clear()
        self._left.clear()
        self._calendar.clear()
        for seq in rows:
            self.schedule_look(seq)
