"""A budget stops calls cleanly, and the run can be resumed."""

import asyncio
import json

import pytest

from tests.models.misbehaving_server import MisbehavingServer
from upshot.core.conversation import Message
from upshot.core.errors import BudgetExceeded, UserError
from upshot.models.base import Request
from upshot.models.client.budget import Budget
from upshot.models.connect import connect, connect_all

ASK = Request([Message("user", "one two three")])


def run_calls(budget, count, **spec):
    async def run():
        async with connect({"model": "scripted:echo", "latency_s": 0.001, **spec}, budget=budget) as model:
            return await asyncio.gather(*(model.generate(ASK) for _ in range(count)), return_exceptions=True)

    return asyncio.run(run())


def test_exactly_the_allowed_calls_are_made_and_the_rest_stop_cleanly():
    budget = Budget(max_calls=10)
    results = run_calls(budget, 50)
    assert sum(isinstance(r, list) for r in results) == 10
    assert sum(isinstance(r, BudgetExceeded) for r in results) == 40
    assert budget.calls == 10


def test_a_spent_token_budget_stops_the_next_call():
    budget = Budget(max_tokens=12)
    results = run_calls(budget, 5, concurrency=1)
    assert [isinstance(r, list) for r in results] == [True, True, False, False, False]
    assert budget.tokens == 12
    assert "12 tokens" in str(results[-1])
    assert "resume" in str(results[-1])


def test_dollars_are_shared_by_all_roles():
    async def run():
        budget = Budget(max_dollars=9e-6)
        async with MisbehavingServer() as server:
            priced = {"url": server.url, "price_in": 1, "price_out": 1}
            models = connect_all({"user": priced, "judge": {**priced, "temperature": 0}}, budget=budget)
            for model in models.values():
                await model.start()
            await models["user"].generate(ASK)
            await models["judge"].generate(ASK)
            with pytest.raises(BudgetExceeded, match="dollars"):
                await models["user"].generate(ASK)
            for model in models.values():
                await model.aclose()
        assert budget.dollars == pytest.approx(12e-6)
        assert len(server.records) == 2

    asyncio.run(run())


def test_what_was_spent_is_saved_and_restored():
    budget = Budget(max_calls=3)
    run_calls(budget, 2)
    saved = json.loads(json.dumps(budget.state()))
    resumed = Budget(max_calls=3)
    resumed.restore(saved)
    results = run_calls(resumed, 3)
    assert [isinstance(r, list) for r in results].count(True) == 1


def test_a_dollar_budget_over_an_unpriced_endpoint_is_refused_before_any_work():
    with pytest.raises(UserError, match="price_in"):
        asyncio.run(connect("http://example.invalid/v1#m", budget=Budget(max_dollars=1)).start())
