"""One budget over several workers, without Ray, and a fixed share of every endpoint for each."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upshot.config.model_spec import ModelSpec
from upshot.config.sampling import Sampling
from upshot.core.errors import BudgetExceeded, UserError
from upshot.models.base import Completion, Request
from upshot.models.client.budget import Budget
from upshot.models.connect import share_endpoints
from upshot.models.endpoint import EndpointModel
from upshot.models.openai_format import ApiAnswer
from upshot.verl.budget import BudgetLedger, WorkerBudget

URL = "http://127.0.0.1:1/v1"


class Endpoint:
    """Counts the calls in flight of all workers."""

    def __init__(self) -> None:
        self.now = self.most = self.calls = 0

    async def answer(self) -> None:
        self.calls += 1
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.001)
        self.now -= 1


class Caller(EndpointModel):
    """A model of the endpoint that makes no network calls."""

    endpoint: Endpoint

    async def start(self) -> None:
        pass

    async def _attempt(self, request: Request, n: int, seed: int | None) -> ApiAnswer:
        await self.endpoint.answer()
        return ApiAnswer([Completion("yes", "stop")] * n, prompt_tokens=5, completion_tokens=5, cost=0.5)


class Client:
    """The connection to a ledger, with a short delay; it can be cut."""

    def __init__(self, ledger: BudgetLedger) -> None:
        self.ledger, self.cut = ledger, False

    async def take_call(self, worker: str) -> bool:
        await self._travel()
        return self.ledger.take_call(worker)

    async def report(
        self, worker: str, spent: Mapping[str, float], last: bool = False
    ) -> tuple[dict[str, float], bool]:
        await self._travel()
        return self.ledger.report(worker, spent, last)

    async def _travel(self) -> None:
        await asyncio.sleep(0)
        if self.cut:
            raise ConnectionError("actor died")


class Process:
    """One worker."""

    def __init__(self, name: str, client: Client, endpoint: Endpoint, workers: int = 2, concurrency: int = 4) -> None:
        budget = Budget(client.ledger.max_calls, max_dollars=40)
        self.model = Caller(ModelSpec(url=URL, model="m", concurrency=concurrency), budget=budget)
        self.model.endpoint = endpoint
        share_endpoints([self.model], workers)
        self.budget = WorkerBudget(name, client, budget)
        self.closed = False

    async def close(self) -> None:
        self.closed = True
        await self.budget.aclose()

    async def ask(self, times: int) -> list[object]:
        self.budget.start(self.close)
        asked = (self.model.generate(Request("hello", Sampling(4))) for _ in range(times))
        return list(await asyncio.gather(*asked, return_exceptions=True))


@given(workers=st.integers(1, 4), most=st.integers(0, 30), before=st.integers(0, 5), times=st.integers(1, 12))
def test_the_number_of_calls_over_all_workers_is_exact_in_any_order(
    workers: int, most: int, before: int, times: int
) -> None:
    async def play() -> tuple[list[object], Endpoint, BudgetLedger]:
        ledger, endpoint = BudgetLedger(most, {"calls": float(before)}), Endpoint()
        client = Client(ledger)
        everybody = [Process(f"w{n}", client, endpoint, workers) for n in range(workers)]
        found = await asyncio.gather(*(one.ask(times) for one in everybody))
        for one in everybody:
            await one.close()
        return [each for own in found for each in own], endpoint, ledger

    found, endpoint, ledger = asyncio.run(play())
    assert endpoint.calls == min(max(most - before, 0), workers * times)
    assert ledger.spent()["calls"] == before + endpoint.calls
    failed = [each for each in found if isinstance(each, Exception)]
    assert len(failed) == workers * times - endpoint.calls
    assert all(
        isinstance(each, BudgetExceeded) and f"the budget of {most} calls is used up" in str(each) for each in failed
    )
    assert not ledger.open


@pytest.mark.parametrize(("workers", "concurrency", "most"), [(2, 5, 4), (3, 3, 3), (4, 2, 4)])
def test_each_worker_uses_at_most_its_share_of_an_endpoint_and_at_least_one(
    workers: int, concurrency: int, most: int
) -> None:
    async def play() -> int:
        endpoint, client = Endpoint(), Client(BudgetLedger())
        everybody = [Process(f"w{n}", client, endpoint, workers, concurrency) for n in range(workers)]
        await asyncio.gather(*(one.ask(10) for one in everybody))
        for one in everybody:
            await one.close()
        return endpoint.most

    assert asyncio.run(play()) == most


def test_the_rate_limit_of_an_endpoint_is_shared_too() -> None:
    model = Caller(ModelSpec(url=URL, model="m", requests_per_minute=600, tokens_per_minute=6000))
    share_endpoints([model], 4)
    assert model.limits.tokens is not None and model.limits.tokens.rate == pytest.approx(25.0)


def test_spending_of_other_workers_is_known_after_a_report() -> None:
    async def play() -> tuple[list[object], dict[str, float]]:
        ledger, endpoint = BudgetLedger(None, {"dollars": 30.0}), Endpoint()
        client = Client(ledger)
        first, second = (Process(name, client, endpoint) for name in ("first", "second"))
        await first.ask(20)
        await first.close()
        second.budget.start(second.close)
        await asyncio.sleep(0.01)
        found = await second.ask(1)
        await second.close()
        return found, ledger.spent()

    found, spent = asyncio.run(play())
    assert isinstance(found[0], BudgetExceeded) and "the budget of 40 dollars is used up (40)" in str(found[0])
    assert spent == {"calls": 20.0, "tokens": 200.0, "dollars": 40.0}


def test_at_the_end_of_a_run_every_worker_closes_its_helpers_and_reports_once_more() -> None:
    async def play() -> tuple[bool, set[str], dict[str, float]]:
        ledger = BudgetLedger()
        one = Process("one", Client(ledger), Endpoint())
        await one.ask(3)
        ledger.closing = True
        while ledger.open:
            await asyncio.sleep(0.01)
        return one.closed, ledger.open, ledger.spent()

    closed, left, spent = asyncio.run(play())
    assert closed and not left and spent["calls"] == 3.0


def test_without_the_ledger_no_further_call_is_sent_and_the_error_says_what_to_do() -> None:
    async def play() -> object:
        client = Client(BudgetLedger(100))
        one = Process("one", client, Endpoint())
        await one.ask(1)
        client.cut = True
        return (await one.ask(1))[0]

    found = asyncio.run(play())
    assert isinstance(found, UserError) and "actor died" in str(found) and "resume the run" in str(found)
