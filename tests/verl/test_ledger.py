"""One budget and one set of limits over several workers, without Ray: a ledger, and shares that report to it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upshot.config.model_spec import ModelSpec
from upshot.config.sampling import Sampling
from upshot.core.errors import BudgetExceeded, UserError
from upshot.models.base import Completion, Request
from upshot.models.client.budget import Budget
from upshot.models.client.limits import EndpointLimits
from upshot.models.endpoint import EndpointModel
from upshot.models.wire import ApiAnswer
from upshot.verl.budget.ledger import EndpointLoad, Ledger, WorkerGrant, WorkerReport, describe_loads, split_fairly
from upshot.verl.budget.quota import WorkerQuota

URL = "http://127.0.0.1:1/v1"


class Endpoint:
    """Counts the calls in flight of everybody."""

    def __init__(self) -> None:
        self.now = self.most = self.calls = 0

    async def answer(self) -> None:
        self.calls += 1
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.001)
        self.now -= 1


class Caller(EndpointModel):
    """A model of the endpoint that sends nothing over the wire."""

    endpoint: Endpoint

    async def start(self) -> None:
        pass

    async def _attempt(self, request: Request, n: int, seed: int | None) -> ApiAnswer:
        await self.endpoint.answer()
        return ApiAnswer([Completion("yes", "stop")] * n, prompt_tokens=5, completion_tokens=5, cost=0.5)


class Process:
    """One worker: a model with its budget and a share."""

    def __init__(
        self, name: str, tell: Callable[[WorkerReport], Awaitable[WorkerGrant]], endpoint: Endpoint, **given: Any
    ) -> None:
        budget = Budget(given.get("max_calls"), given.get("max_tokens"), given.get("max_dollars"))
        spec = ModelSpec(url=URL, model="m", concurrency=given.get("concurrency", 4))
        self.model = Caller(spec, role="judge", budget=budget, limits=EndpointLimits.of(spec))
        self.model.endpoint = endpoint
        self.share = WorkerQuota(name, tell, budget, [self.model])
        self.closed = 0

    async def close(self) -> None:
        self.closed += 1
        await self.share.aclose()

    async def ask(self, times: int) -> list[Any]:
        self.share.start(self.close)
        one = Request("hello", Sampling(4))
        return await asyncio.gather(*(self.model.generate(one) for _ in range(times)), return_exceptions=True)


def told(ledger: Ledger) -> Callable[[WorkerReport], Awaitable[WorkerGrant]]:
    async def tell(report: WorkerReport) -> WorkerGrant:
        await asyncio.sleep(0)
        return ledger.report(report)

    return tell


def played(workers: int, times: int, ledger: Ledger, **given: Any) -> tuple[Endpoint, list[Any], list[Process]]:
    """What comes of so many calls in each of several workers."""
    endpoint = Endpoint()

    async def all_of_them() -> tuple[list[Any], list[Process]]:
        processes = [Process(f"w{n}", told(ledger), endpoint, **given) for n in range(workers)]
        found = await asyncio.gather(*(process.ask(times) for process in processes))
        for process in processes:
            await process.close()
        return [each for some in found for each in some], processes

    found, processes = asyncio.run(all_of_them())
    return endpoint, found, processes


def test_the_limit_of_an_endpoint_holds_over_all_workers_and_is_used() -> None:
    endpoint, found, _ = played(4, 25, Ledger(), concurrency=6)
    assert endpoint.calls == len(found) == 100 and not any(isinstance(each, Exception) for each in found)
    assert endpoint.most == 6


def test_a_limit_smaller_than_the_number_of_workers_lets_everybody_through() -> None:
    endpoint, found, _ = played(4, 5, Ledger(), concurrency=1)
    assert (endpoint.calls, endpoint.most) == (20, 1)
    assert not any(isinstance(each, Exception) for each in found)


def test_a_budget_of_calls_is_exact_over_all_workers_and_ends_with_the_words_of_local_mode() -> None:
    endpoint, found, _ = played(3, 30, Ledger(max_calls=50), max_calls=50)
    errors = [each for each in found if isinstance(each, Exception)]
    assert endpoint.calls == 50 and len(errors) == 40
    assert all(isinstance(error, BudgetExceeded) for error in errors)
    assert "the budget of 50 calls is spent (50)" in str(errors[0]) and "raise budget.max_calls" in str(errors[0])


@pytest.mark.parametrize(("limit", "most"), [({"max_tokens": 200}, 20), ({"max_dollars": 10.0}, 20)])
def test_tokens_and_dollars_pass_their_limit_by_what_was_under_way_at_most(limit: dict[str, Any], most: int) -> None:
    endpoint, found, _ = played(3, 60, Ledger(), concurrency=3, **limit)
    assert any(isinstance(each, BudgetExceeded) for each in found)
    assert most <= endpoint.calls < 100  # of 180: reports are 0.02 to 0.25 s apart


def test_calls_that_a_worker_does_not_use_go_to_others() -> None:
    ledger = Ledger(max_calls=10)
    assert ledger.report(WorkerReport("lazy", {"calls": 0, "tokens": 0, "dollars": 0}, 0, 1)).allowed == 5
    zero = {"calls": 0, "tokens": 0, "dollars": 0.0}
    assert ledger.report(WorkerReport("lazy", zero, allowed=0)).allowed == 0  # idle: it gave them back
    granted = 0
    for _ in range(20):
        granted = ledger.report(WorkerReport("busy", zero, granted, 9)).allowed or 0
    assert granted == 10


def test_a_worker_that_dies_gives_its_slots_back_and_calls_it_may_have_sent_count() -> None:
    ledger = Ledger(max_calls=100)
    spent = {"calls": 2, "tokens": 20, "dollars": 1.0}
    first = ledger.report(WorkerReport("a", spent, allowed=10, wants=0, loads={"e": EndpointLoad(8, 0, 0, waiting=8)}))
    assert first.caps == {"e": 8}
    zero = {"calls": 0, "tokens": 0, "dollars": 0.0}
    hungry = WorkerReport("b", zero, loads={"e": EndpointLoad(8, 0, 0, waiting=8)})
    assert ledger.report(hungry).caps == {"e": 0}
    ledger.bury("a")
    assert ledger.report(hungry).caps == {"e": 8}
    assert ledger.spent() == {"calls": 10, "tokens": 20, "dollars": 1.0}


def test_slots_are_handed_on_only_when_they_are_known_to_be_free() -> None:
    ledger, zero = Ledger(), {"calls": 0, "tokens": 0, "dollars": 0.0}
    ledger.report(WorkerReport("a", zero, loads={"e": EndpointLoad(8, 0, 0, waiting=20)}))
    ledger.report(WorkerReport("b", zero, loads={"e": EndpointLoad(8, 0, 0, waiting=20)}))
    assert ledger.report(WorkerReport("a", zero, loads={"e": EndpointLoad(8, 8, 8, waiting=12)})).caps == {"e": 4}
    assert ledger.report(WorkerReport("b", zero, loads={"e": EndpointLoad(8, 0, 0, waiting=20)})).caps == {"e": 0}
    assert ledger.report(WorkerReport("a", zero, loads={"e": EndpointLoad(8, 4, 6, waiting=12)})).caps == {"e": 4}
    assert ledger.report(WorkerReport("b", zero, loads={"e": EndpointLoad(8, 0, 0, waiting=20)})).caps == {"e": 2}


def test_what_was_spent_before_a_resume_counts() -> None:
    ledger = Ledger(max_calls=5, spent={"calls": 4, "tokens": 7, "dollars": 0.5})
    endpoint, *_ = played(2, 3, ledger, max_calls=5)
    assert endpoint.calls == 1
    assert ledger.spent() == {"calls": 5, "tokens": 17, "dollars": 1.0}


def test_a_ledger_that_dies_is_a_clear_error_for_calls_that_wait() -> None:
    async def dead(report: WorkerReport) -> WorkerGrant:
        raise ConnectionError("the actor died unexpectedly")

    async def ask() -> list[Any]:
        return await Process("w", dead, Endpoint()).ask(3)

    found = asyncio.run(ask())
    assert all(isinstance(each, UserError) for each in found)
    assert "ledger" in str(found[0]) and "the actor died unexpectedly" in str(found[0]) and "resume" in str(found[0])


def test_workers_are_closed_once_when_the_run_is_over_and_their_last_spending_counts() -> None:
    ledger, endpoint = Ledger(), Endpoint()

    async def run() -> Process:
        process = Process("w", told(ledger), endpoint)
        await process.ask(7)
        ledger.closing = True
        while ledger.workers:
            await asyncio.sleep(0.01)
        return process

    assert asyncio.run(run()).closed == 1
    assert ledger.spent()["calls"] == 7


def test_the_pace_of_an_endpoint_is_shared_with_its_slots() -> None:
    ledger, endpoint = Ledger(), Endpoint()

    async def run() -> list[float]:
        processes = [Process(f"w{n}", told(ledger), endpoint, concurrency=8) for n in range(2)]
        for process in processes:
            process.model.limits = EndpointLimits(8, requests_per_minute=6000)
            process.share = WorkerQuota(process.share.worker, told(ledger), process.model.budget, [process.model])
            process.share.start(process.close)
        await asyncio.sleep(0.6)  # two idle reports
        rates = [process.model.limits._requests.rate for process in processes]  # type: ignore[union-attr]
        for process in processes:
            await process.close()
        return rates

    rates = asyncio.run(run())
    assert sum(rates) == pytest.approx(100) and all(rates)


@given(st.integers(1, 200), st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 90), min_size=1))
def test_fair_parts_make_the_whole_and_nobody_wants_while_another_has_more_than_it_wants(
    bound: int, demands: dict[str, int]
) -> None:
    parts = split_fairly(bound, demands)
    assert sum(parts.values()) == bound and min(parts.values()) >= 0
    short = [name for name in demands if parts[name] < demands[name]]
    for name in short:
        assert all(parts[other] <= max(demands[other], 0) for other in demands)
        assert all(parts[other] <= parts[name] + 1 for other in demands)


def test_the_standing_of_the_endpoints_leaves_out_those_nobody_calls() -> None:
    loads = {"http://a/v1": EndpointLoad(8, 8, 8, 3, 61.0), "http://b/v1": EndpointLoad(8, 8, 0)}
    assert describe_loads(loads) == "http://a/v1: 8 of 8 calls in flight, 3 waiting, the slowest for 61 s"
