"""One budget over all workers of a run. `models/connect.py` has their shares of every endpoint's limits.

`BudgetLedger` counts for all workers (in a Ray actor, `adapters/budget.py`), `WorkerBudget` is a worker's side. If
calls are limited, each call is requested from the ledger, so that their number is exact; compared with a model's
answer, that takes no time. Tokens and dollars are reported a few times a second, and may exceed their limit by the
amount not reported yet.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol, TypeVar

from upshot.core.errors import UserError
from upshot.models.client.budget import SPENT, Budget

T = TypeVar("T")
log = logging.getLogger(__name__)

BEAT_S = 0.25
"""Seconds between two reports of a worker."""


class BudgetLedger:
    """Counts what all workers of a run have spent."""

    def __init__(self, max_calls: int | None = None, before: Mapping[str, float] | None = None) -> None:
        self.max_calls = max_calls
        self.closing = False
        self.open: set[str] = set()
        """Workers that are still reporting."""
        self._spent: defaultdict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys(SPENT, 0.0))
        """Total spending by worker; under '' that of earlier parts of the run."""
        self._spent[""].update(before or {})

    def take_call(self, worker: str) -> bool:
        """Count a call that a worker is about to send; False if none is left."""
        if self.max_calls is not None and self.spent()["calls"] >= self.max_calls:
            return False
        self._spent[worker]["calls"] += 1
        return True

    def report(self, worker: str, spent: Mapping[str, float], last: bool = False) -> tuple[dict[str, float], bool]:
        """Receive the total spending of a worker; returns that of all others, and whether the run is over."""
        of_worker = self._spent[worker]
        known = SPENT if self.max_calls is None else SPENT[1:]  # requested calls are counted already
        of_worker.update({what: spent[what] for what in known})
        (self.open.discard if last else self.open.add)(worker)
        total = self.spent()
        return {what: total[what] - of_worker[what] for what in SPENT}, self.closing

    def spent(self) -> dict[str, float]:
        """What all workers have reported so far, including those that have ended."""
        return {what: sum(spent[what] for spent in self._spent.values()) for what in SPENT}


class BudgetClient(Protocol):
    """A connection to the ledger, wherever it is."""

    def take_call(self, worker: str) -> Awaitable[bool]: ...

    def report(
        self, worker: str, spent: Mapping[str, float], last: bool = False
    ) -> Awaitable[tuple[dict[str, float], bool]]: ...


class WorkerBudget:
    """Counts the spending of a worker's models together with that of all other workers."""

    def __init__(self, worker: str, client: BudgetClient, budget: Budget) -> None:
        self.worker, self.budget = worker, budget
        self._client = client
        self._own = dict.fromkeys(SPENT, 0.0)
        self._others = dict.fromkeys(SPENT, 0.0)
        self._lost: UserError | None = None
        self._beat: asyncio.Task[None] | None = None
        budget.tally, budget.leave = self._tally, self._take_call

    def start(self, close: Callable[[], Awaitable[None]]) -> None:
        """Start reporting; `close` closes the helpers when the run is over."""
        if self._beat is None:
            self._beat = asyncio.create_task(self._report_on(close))

    async def aclose(self) -> None:
        """Send the last report."""
        beat, self._beat = self._beat, None
        if beat is None or self._lost is not None:
            return
        if beat is not asyncio.current_task():
            beat.cancel()
            await asyncio.gather(beat, return_exceptions=True)
        await self._client.report(self.worker, dict(self._own), True)

    async def _report_on(self, close: Callable[[], Awaitable[None]]) -> None:
        closing = False
        while not closing:
            try:
                self._others, closing = await self._ask(self._client.report(self.worker, dict(self._own)))
            except UserError as error:
                log.error("%s", error)
                return
            await (close() if closing else asyncio.sleep(BEAT_S))

    async def _ask(self, answer: Awaitable[T]) -> T:
        """The ledger's answer; any exception of the connection means that the ledger is gone."""
        try:
            return await answer
        except Exception as error:
            self._lost = UserError(describe_loss(error))
            raise self._lost from error

    def _tally(self, what: str, amount: float) -> float:
        self._own[what] += amount
        return self._own[what] + self._others[what]

    async def _take_call(self) -> None:
        """Request a call; `BudgetExceeded` if none is left for any worker."""
        if self._lost is not None:
            raise self._lost
        most = self.budget.max_calls
        if most is not None and not await self._ask(self._client.take_call(self.worker)):
            self._others["calls"] = max(self._others["calls"], most - self._own["calls"])
            self.budget.check()


def describe_loss(error: BaseException) -> str:
    """The error if the ledger cannot be reached."""
    message = (str(error).strip() or type(error).__name__).splitlines()[0]
    return (
        "the actor that keeps the budget for all workers of this run is gone "
        f"({type(error).__name__}: {message}); no further call can be sent: resume the run"
    )
