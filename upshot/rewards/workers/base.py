"""A manager runs verifiers somewhere. The verdicts are the same everywhere; what differs is cost and protection."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from typing import Any

from upshot.config.registry import Registry
from upshot.core.errors import UserError
from upshot.core.helper import Helper
from upshot.core.score import Score
from upshot.core.time_limit import limit_call, limit_call_now
from upshot.tasks.verifiers.base import Claim, Verifier, verifiers


class Manager(Helper, ABC):
    """Verifies claims; an item's failure is its own, a missing score with the reason.

    `judge` (a `Model`), `models` (helper models by name), `sandbox` (a `CodeRunner`) and `verdicts` (how its results
    are read) come from the program, for the verifiers that wait for one of them.
    """

    def __init__(
        self, judge: Any = None, sandbox: Any = None, models: Mapping[str, Any] | None = None, verdicts: Any = None
    ) -> None:
        self._context = {"judge": judge, "sandbox": sandbox, "models": models or {}, "verdicts": verdicts}
        self._built: dict[tuple[str, str], Verifier] = {}
        self.counts: Counter[str] = Counter()
        """What its work came to since the run began."""

    @abstractmethod
    async def verify(self, claim: Claim) -> Score:
        """The score of one claim."""

    def verifier(self, claim: Claim) -> Verifier:
        """The verifier of a claim; an unknown source is a `UserError`."""
        key = (claim.source, repr(sorted(claim.options.items())))
        if key not in self._built:
            context = {name: value for name, value in self._context.items() if value is not None}
            self._built[key] = verifiers.create(claim.source, claim.options, where="the row's source", **context)
        return self._built[key]

    def stats(self) -> dict[str, float]:
        """Items, timeouts, retries: whatever this kind of manager counts."""
        return {f"verifier_{name}": float(number) for name, number in self.counts.items()}

    def state(self) -> dict[str, Any]:
        """The counters."""
        return dict(self.counts)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on counting from there."""
        self.counts.clear()
        self.counts.update(state)


async def verify_here(verifier: Verifier, claim: Claim) -> Score:
    """Run a verifier in this process; what it raises becomes a missing score, except a `UserError`."""
    try:
        if verifier.waits:
            verdict = await limit_call(verifier, verifier.verify, claim.response, claim.reference, claim.extra)
        else:
            verdict = limit_call_now(verifier, verifier.score, claim.response, claim.reference, claim.extra)
        return Score.of(verdict, f"verifier '{claim.source}'")
    except UserError:
        raise
    except Exception as error:
        return Score.failed(error, "verifier")


managers: Registry[Manager] = Registry("reward manager", "upshot.rewards.workers", base=Manager)
"""Managers that a recipe can name in `reward.manager`."""
