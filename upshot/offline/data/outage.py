"""Stops a run in which too much fails: an endpoint that is down should not use up all goals."""

from __future__ import annotations

from collections import Counter, deque

from upshot.core.errors import UserError

RECENT = 20
"""How many of the latest pieces of work are looked at."""
TOO_MANY = 0.5
"""The share of failures among them from which a run stops."""


class Outage:
    """Watches how the latest pieces of work ended."""

    def __init__(self, what: str) -> None:
        self.what = what
        """What a piece of work is called, in the plural."""
        self._latest: deque[str | None] = deque(maxlen=RECENT)

    def heard(self, failure: str | None) -> None:
        """Take note of a finished piece and why it failed (None: it did not); `UserError` when too many did."""
        self._latest.append(failure)
        reasons = Counter(reason for reason in self._latest if reason is not None)
        failed = sum(reasons.values())
        if len(self._latest) == RECENT and failed > RECENT * TOO_MANY:
            commonest, _ = reasons.most_common(1)[0]
            raise UserError(
                f"{failed} of the last {RECENT} {self.what} failed, mostly: {commonest}; what is finished is saved: "
                f"mend it and give the same command again, the failed ones are tried again"
            )
