"""What a run may spend on model calls: calls, tokens, dollars; shared by all its models, saved with its state."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from upshot.core.errors import BudgetExceeded

SPENT = ("calls", "tokens", "dollars")


@dataclass
class Budget:
    """Limits and spending. Calls are exact; tokens and dollars can exceed their limit by the calls in flight."""

    max_calls: int | None = None
    max_tokens: int | None = None
    """Prompt and completion tokens together."""
    max_dollars: float | None = None
    calls: int = 0
    """Calls sent, failed ones too; retries of a call and cache hits do not count."""
    tokens: int = 0
    dollars: float = 0.0
    tally: Callable[[str, float], float] | None = None
    """Adds to a counter that several processes share, and returns its sum; None: this process has its own."""
    leave: Callable[[], Awaitable[None]] | None = None
    """Waits for permission to send one more call, if several processes share them."""

    def check(self) -> None:
        """Raise `BudgetExceeded` if no further call may be sent."""
        if self.tally is not None:
            self._look()
        for what in SPENT:
            spent, limit = getattr(self, what), getattr(self, f"max_{what}")
            if limit is not None and spent >= limit:
                raise BudgetExceeded(
                    f"the budget of {limit:g} {what} is used up ({spent:g}); finished work is saved: "
                    f"raise budget.max_{what} and resume (a training: --resume RUN budget.max_{what}=…)"
                )

    def take_call(self) -> None:
        """Count one call about to be sent, or raise `BudgetExceeded`."""
        self.check()
        self._add("calls", 1)
        if self.max_calls is not None and self.calls > self.max_calls:  # another process took the last one meanwhile
            self._add("calls", -1)
            self.check()

    async def admit(self) -> None:
        """Wait until a call may be taken; `take_call` must follow immediately, without an await in between."""
        if self.leave is not None:
            await self.leave()

    def charge(self, tokens: int, dollars: float) -> None:
        """Add what an answered call used."""
        self._add("tokens", tokens)
        self._add("dollars", dollars)

    def _add(self, what: str, amount: float) -> None:
        total = getattr(self, what) + amount if self.tally is None else self.tally(what, amount)
        setattr(self, what, total if what == "dollars" else int(total))

    def _look(self) -> None:
        """See what the other processes have spent."""
        for what in SPENT:
            self._add(what, 0)

    def state(self) -> dict[str, float]:
        """What is spent, to be saved with the run."""
        if self.tally is not None:
            self._look()
        return {"calls": self.calls, "tokens": self.tokens, "dollars": self.dollars}

    def restore(self, state: Mapping[str, float]) -> None:
        """Continue from a saved state; the limits stay those of this run."""
        self.calls, self.tokens = int(state["calls"]), int(state["tokens"])
        self.dollars = float(state["dollars"])
