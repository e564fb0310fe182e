"""The circuit breaker of one replica: open after failures in a row, tried again with one call after a pause."""

from __future__ import annotations

FAILURES = 3
"""Failures in a row that open it."""
PAUSE_S = 2.0
"""Seconds until the first trial; doubles with each trial that fails."""
LONGEST_PAUSE_S = 60.0


class Breaker:
    """Closed: calls go through. Open: none does. After the pause one does, and its outcome decides."""

    def __init__(self) -> None:
        self.opened = 0
        """How often it opened after having been closed."""
        self._in_row = 0
        self._pause = PAUSE_S
        self._until: float | None = None
        self._on_trial = False

    @property
    def is_open(self) -> bool:
        """Whether the last calls failed and none has succeeded since."""
        return self._until is not None

    def lets_through(self, now: float) -> bool:
        """Whether a call may be sent."""
        return self._until is None or (now >= self._until and not self._on_trial)

    def begin(self, now: float) -> bool:
        """A call is sent; whether it is the trial."""
        trial = self.is_open and self.lets_through(now)
        self._on_trial |= trial
        return trial

    def succeeded(self) -> None:
        """The replica answered."""
        self._in_row, self._pause, self._until, self._on_trial = 0, PAUSE_S, None, False

    def failed(self, now: float, trial: bool = False) -> None:
        """The replica did not answer; those that were under way when it opened do not prolong the pause."""
        self._in_row += 1
        if trial:
            self._pause = min(2 * self._pause, LONGEST_PAUSE_S)
            self._until, self._on_trial = now + self._pause, False
        elif self._until is None and self._in_row >= FAILURES:
            self.trip(now)

    def trip(self, now: float) -> None:
        """Open it."""
        self.opened += not self.is_open
        self._until = now + self._pause

    def abandoned(self) -> None:
        """The trial was broken off by us and told nothing."""
        self._on_trial = False
