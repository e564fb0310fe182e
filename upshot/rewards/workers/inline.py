"""In process: no overhead, `breakpoint()` works. Only verifiers that may hang (math) get worker processes."""

from __future__ import annotations

from typing import Any

from upshot.core.score import Score
from upshot.rewards.workers.base import managers, verify_here
from upshot.rewards.workers.pool import PoolManager
from upshot.tasks.verifiers.base import Claim


@managers.register("inline")
class InlineManager(PoolManager):
    """Scores here; risky verifiers that `quick` did not settle go to worker processes."""

    def __init__(self, workers: int = 2, seconds: float = 10.0, **options: Any) -> None:
        super().__init__(workers, seconds, **options)

    async def verify(self, claim: Claim) -> Score:
        """The score of one claim."""
        verifier = self.verifier(claim)
        if verifier.waits or not verifier.risky:
            return await verify_here(verifier, claim)
        quick = verifier.quick(claim.response, claim.reference, claim.extra)
        return quick if quick is not None else await self._in_worker(claim)
