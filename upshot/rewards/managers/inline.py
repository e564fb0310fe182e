"""In process: no overhead, `breakpoint()` works. Only verifiers that may hang (math) get worker processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from upshot.rewards.managers.base import Manager, managers, verify_here
from upshot.score import Score
from upshot.verifiers.base import Claim
from upshot.verifiers.workers import Workers


@managers.register("inline")
class Inline(Manager):
    """Scores here; risky verifiers that `quick` did not settle go to worker processes."""

    def __init__(
        self,
        workers: int = 2,
        seconds: float = 10.0,
        memory_mb: int = 2048,
        judge: Any = None,
        sandbox: Any = None,
        models: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(judge, sandbox, models)
        self._limits = (workers, seconds, memory_mb)
        self._workers: Workers | None = None

    async def verify(self, claim: Claim) -> Score:
        """The score of one claim."""
        verifier = self.verifier(claim)
        if verifier.waits or not verifier.risky:
            return await verify_here(verifier, claim)
        quick = verifier.quick(claim.response, claim.reference, claim.extra)
        if quick is not None:
            return quick
        if self._workers is None:
            self._workers = Workers(*self._limits)
        return await self._workers.verify(claim)

    async def aclose(self) -> None:
        """End the worker processes, if any were needed."""
        if self._workers is not None:
            await self._workers.aclose()
            self._workers = None

    def stats(self) -> dict[str, float]:
        """Counters of the worker processes."""
        return {f"verifier_{name}": float(n) for name, n in self._workers.stats.items()} if self._workers else {}
