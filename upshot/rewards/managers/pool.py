"""In worker processes: all cores, a time limit that kills, a memory limit, one item's crash or hang is its own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from upshot.rewards.managers.base import Manager, managers, verify_here
from upshot.score import Score
from upshot.verifiers.base import Claim
from upshot.verifiers.workers import Workers


@managers.register("pool")
class Pool(Manager):
    """Every verifier that computes runs in a worker; those that wait for a model or sandbox wait here."""

    def __init__(
        self,
        workers: int | None = None,
        seconds: float = 30.0,
        memory_mb: int = 2048,
        recycle: int = 2000,
        judge: Any = None,
        sandbox: Any = None,
        models: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(judge, sandbox, models)
        self._limits = (workers or len(os.sched_getaffinity(0)), seconds, memory_mb, recycle)
        self._workers: Workers | None = None

    async def verify(self, claim: Claim) -> Score:
        """The score of one claim."""
        verifier = self.verifier(claim)
        if verifier.waits:
            return await verify_here(verifier, claim)
        if self._workers is None:  # made on the event loop that uses it
            self._workers = Workers(*self._limits)
        return await self._workers.verify(claim)

    async def aclose(self) -> None:
        """End the worker processes."""
        if self._workers is not None:
            await self._workers.aclose()
            self._workers = None

    def stats(self) -> dict[str, float]:
        """Items, timeouts, crashes, forks."""
        return {f"verifier_{name}": float(n) for name, n in self._workers.stats.items()} if self._workers else {}
