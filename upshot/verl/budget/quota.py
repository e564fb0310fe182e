"""A worker's part of what the whole run may spend and have in flight, renewed by reports to the ledger."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress

from upshot.core.errors import UserError
from upshot.models.base import Model
from upshot.models.client.budget import SPENT, Budget
from upshot.models.client.guarded import GuardedModel
from upshot.models.client.limits import EndpointLimits
from upshot.verl.budget.ledger import EndpointLoad, WorkerGrant, WorkerReport

log = logging.getLogger(__name__)

Tell = Callable[[WorkerReport], Awaitable[WorkerGrant]]
"""Reports to the ledger, wherever that is."""
HUNGRY_S, IDLE_S = 0.02, 0.25
"""Seconds between two reports while calls wait for a part that the worker does not have, and otherwise."""
SHARED = ("endpoint", "provider", "replicas")
"""Kinds of models that all workers call; others are of one process."""


class WorkerQuota:
    """Governs the limits of a worker's models and its budget. Nothing is let through before the first grant."""

    def __init__(self, worker: str, tell: Tell, budget: Budget, models: Iterable[Model]) -> None:
        self.worker = worker
        self.budget = budget
        self._tell = tell
        self._at = by_endpoint(models)
        self._own: dict[str, float] = budget.state()
        self._others = dict.fromkeys(SPENT, 0.0)
        self._allowed: int | None = 0
        self._wants = 0
        self._wake = asyncio.Event()
        self._granted = asyncio.Event()
        self._closed: Callable[[], Awaitable[None]] | None = None
        self._dead: UserError | None = None
        self._beat: asyncio.Task[None] | None = None
        budget.tally, budget.leave = self._tally, self._leave
        for limits in self._limits():
            limits.slots.on_wait = self._wake.set
            limits.slots.lend(0)

    def start(self, closed: Callable[[], Awaitable[None]]) -> None:
        """Begin to report; `closed` closes the helpers when the run is over."""
        if self._beat is None:
            self._closed = closed
            self._beat = asyncio.create_task(self._report_on())

    async def aclose(self) -> None:
        """Report for the last time: what was spent, and that all slots are free."""
        beat, self._beat = self._beat, None
        if beat is None or self._dead is not None:
            return
        if beat is not asyncio.current_task():
            beat.cancel()
            await asyncio.gather(beat, return_exceptions=True)
        self._fail(UserError("the run is over"))
        await self._tell(WorkerReport(self.worker, dict(self._own), last=True))

    def _limits(self) -> list[EndpointLimits]:
        return [models[0].limits for models in self._at.values()]

    async def _report_on(self) -> None:
        while True:
            self._wake.clear()
            try:
                grant = await self._tell(self._report())
            except Exception as error:  # whatever the way to the ledger raises, there is none any more
                log.error("%s", describe_loss(error))
                self._fail(UserError(describe_loss(error)))
                return
            self._take(grant)
            if grant.closing:
                if self._closed is not None:
                    await self._closed()
                return
            if self._hungry():
                await asyncio.sleep(HUNGRY_S)
            else:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), IDLE_S)

    def _report(self) -> WorkerReport:
        loads = {name: _load(models) for name, models in self._at.items()}
        busy = self._wants or any(load.held + load.waiting for load in loads.values())
        if self._allowed is not None and not busy:
            self._allowed = int(self._own["calls"])  # nobody wants the rest: others may
        return WorkerReport(self.worker, dict(self._own), self._allowed or 0, self._wants, loads)

    def _take(self, grant: WorkerGrant) -> None:
        self._others, self._allowed = dict(grant.others), grant.allowed
        for name, cap in grant.caps.items():
            limits = self._at[name][0].limits
            limits.share(max(cap, limits.slots.held, 1) / max(limits.slots.bound, 1))
            limits.slots.lend(cap)
        granted, self._granted = self._granted, asyncio.Event()
        granted.set()

    def _hungry(self) -> bool:
        return self._wants > 0 or any(limits.slots.waiting for limits in self._limits())

    def _tally(self, what: str, amount: float) -> float:
        self._own[what] += amount
        return self._own[what] + self._others[what]

    async def _leave(self) -> None:
        """Wait for a call of the budget; raises when there is none left for anybody."""
        while self._allowed is not None and self._own["calls"] >= self._allowed:
            if self._dead is not None:
                raise self._dead
            self.budget.check()
            self._wants += 1
            self._wake.set()
            try:
                await self._granted.wait()
            finally:
                self._wants -= 1

    def _fail(self, error: UserError) -> None:
        self._dead = error
        for limits in self._limits():
            limits.slots.fail(error)
        self._granted.set()


def describe_loss(error: BaseException) -> str:
    """What is said when the ledger cannot be reached."""
    told = (str(error).strip() or type(error).__name__).splitlines()[0]
    return (
        "the ledger, which keeps budget and limits for all workers of this run, is gone "
        f"({type(error).__name__}: {told}); no further call can be sent: resume the run"
    )


def by_endpoint(models: Iterable[Model]) -> dict[str, list[GuardedModel]]:
    """The models that every worker calls, by their endpoint; those of one share their limits."""
    out: dict[str, list[GuardedModel]] = {}
    for model in dict.fromkeys(models):
        if isinstance(model, GuardedModel) and model.spec.kind in SHARED:
            where = model.spec.url or model.spec.model
            out.setdefault(where if isinstance(where, str) else " ".join(where), []).append(model)
    return out


def _load(models: list[GuardedModel]) -> EndpointLoad:
    slots = models[0].limits.slots
    slowest = max(model.traffic.slowest for model in models)
    return EndpointLoad(slots.bound, slots.cap or 0, slots.held, slots.waiting, slowest)
