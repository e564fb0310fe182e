"""What a run may spend on model calls: calls, tokens, dollars; shared by all its models, saved with its state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from upshot.errors import BudgetExceeded


@dataclass
class Budget:
    """Limits and what is spent. Calls are exact; tokens and dollars can pass their limit by what was in flight."""

    max_calls: int | None = None
    max_tokens: int | None = None
    """Prompt and completion tokens together."""
    max_dollars: float | None = None
    calls: int = 0
    """Calls sent, failed ones too; retries of a call and cache hits do not count."""
    tokens: int = 0
    dollars: float = 0.0

    def check(self) -> None:
        """Raise `BudgetExceeded` when no further call may be sent."""
        for what, spent, limit in (
            ("calls", self.calls, self.max_calls),
            ("tokens", self.tokens, self.max_tokens),
            ("dollars", self.dollars, self.max_dollars),
        ):
            if limit is not None and spent >= limit:
                raise BudgetExceeded(
                    f"the budget of {limit:g} {what} is spent ({spent:g}); what is finished is saved: "
                    f"raise budget.max_{what} and resume (a training: --resume RUN budget.max_{what}=…)"
                )

    def take_call(self) -> None:
        """Count one call about to be sent, or raise `BudgetExceeded`."""
        self.check()
        self.calls += 1

    def charge(self, tokens: int, dollars: float) -> None:
        """Add what an answered call used."""
        self.tokens += tokens
        self.dollars += dollars

    def state(self) -> dict[str, float]:
        """What is spent, to be saved with the run."""
        return {"calls": self.calls, "tokens": self.tokens, "dollars": self.dollars}

    def restore(self, state: Mapping[str, float]) -> None:
        """Continue from a saved state; the limits stay those of this run."""
        self.calls, self.tokens = int(state["calls"]), int(state["tokens"])
        self.dollars = float(state["dollars"])

    def stats(self) -> dict[str, float]:
        """Spent and limits, for the metrics."""
        return {k: float(v) for k, v in asdict(self).items() if v is not None}
