"""In this machine's processes: `pool` puts all that computes into workers, `inline` only what may hang.

Workers use all cores, have a time limit that kills and a memory limit; one item's crash or hang is its own. In process
there is no overhead, and `breakpoint()` works.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from upshot.config.bounds import Count, Positive
from upshot.core.score import Score
from upshot.rewards.workers.base import Manager, managers, verify_here
from upshot.tasks.verifiers.base import Claim
from upshot.tasks.verifiers.workers import VerifierWorkers


@managers.register("pool")
class PoolManager(Manager):
    """Every verifier that computes runs in a worker; those that wait for a model or sandbox wait here."""

    def __init__(
        self,
        workers: Count | None = None,
        seconds: Positive = 30.0,
        memory_mb: Count = 2048,
        recycle: Count = 2000,
        **context: Any,
    ) -> None:
        super().__init__(**context)
        self._limits = (workers or len(os.sched_getaffinity(0)), seconds, memory_mb, recycle)
        self._workers: VerifierWorkers | None = None
        self.has_counted = False

    async def verify(self, claim: Claim) -> Score:
        """The score of one claim."""
        verifier = self.verifier(claim)
        return await (verify_here(verifier, claim) if verifier.waits else self._in_worker(claim))

    async def _in_worker(self, claim: Claim) -> Score:
        if self._workers is None:  # made on the event loop that uses it
            self._workers = VerifierWorkers(*self._limits, self.counts)
            self.has_counted = True
        return await self._workers.verify(claim)

    async def aclose(self) -> None:
        """End the worker processes, if any were needed."""
        workers, self._workers = self._workers, None
        if workers is not None:
            await workers.aclose()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on counting from there."""
        super().restore(state)
        self.has_counted = self.has_counted or bool(state)


@managers.register("inline")
class InlineManager(PoolManager):
    """Scores here; risky verifiers that `quick` did not settle go to worker processes."""

    def __init__(self, workers: Count = 2, seconds: Positive = 10.0, **options: Any) -> None:
        super().__init__(workers, seconds, **options)

    async def verify(self, claim: Claim) -> Score:
        """The score of one claim."""
        verifier = self.verifier(claim)
        if verifier.waits or not verifier.risky:
            return await verify_here(verifier, claim)
        quick = verifier.quick(claim.response, claim.reference, claim.extra)
        return quick if quick is not None else await self._in_worker(claim)
