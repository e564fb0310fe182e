"""Thousands of calls to a server that drops, rate-limits, garbles and stalls: none is lost, none counted twice."""

import asyncio
import gc
import os
import tracemalloc

from tests.models.misbehaving_server import MisbehavingServer
from tests.patience import patience
from upshot.config.sampling import Sampling
from upshot.core.conversation import Message
from upshot.models.base import ModelCallError, Request
from upshot.models.client.budget import Budget
from upshot.models.connect import connect

CALLS = int(os.environ.get("UPSHOT_SOAK_CALLS", "2000"))
FAULTS = {"drop": 0.05, "limit_rate": 0.05, "malformed": 0.03, "stall": 0.01, "error": 0.02, "latency": 0.02}


def test_every_call_is_answered_once_and_counted_once():
    async def run():
        budget = Budget()
        async with MisbehavingServer(**FAULTS) as server:
            spec = {
                "url": server.url,
                "concurrency": 256,
                "timeout_s": patience(
                    5.0
                ),  # well above what a busy machine needs for a call; otherwise it would be served twice
                "backoff_s": 0.1,
                "price_in": 1,
                "price_out": 1,
            }
            async with connect(spec, role="user", budget=budget) as model:
                requests = [
                    Request([Message("user", f"call {i} of many")], Sampling(seed=i), n=1 + i % 2) for i in range(CALLS)
                ]
                answers = await asyncio.gather(*map(model.generate, requests))
                return server, budget, answers, model.stats()

    server, budget, answers, stats = asyncio.run(run())
    assert [{c.text for c in answer} for answer in answers] == [{f"call {i} of many"} for i in range(CALLS)]
    assert [len(answer) for answer in answers] == [1 + i % 2 for i in range(CALLS)]
    served = [record.body["seed"] for record in server.served()]
    assert sorted(served) == list(range(CALLS)), "each call was served exactly once"
    assert stats["user/calls"] == budget.calls == CALLS
    assert stats["user/failed"] == 0
    assert stats["user/completion_tokens"] == 4 * sum(1 + i % 2 for i in range(CALLS))
    assert budget.tokens == stats["user/prompt_tokens"] + stats["user/completion_tokens"]
    assert stats["user/retries"] == sum(server.outcomes.values()) - CALLS
    outcome_of = {
        "connection": "dropped",
        "rate_limited": "limited",
        "bad_response": "malformed",
        "timeout": "stalled",
        "http_500": "error",
    }
    assert {o: stats[f"user/retries/{r}"] for r, o in outcome_of.items()} == {
        o: server.outcomes[o] for o in outcome_of.values()
    }
    assert server.most_in_flight <= 256


def test_memory_stays_flat_over_many_calls():
    async def run():
        sizes = []
        async with (
            MisbehavingServer(keep_bodies=False, drop=0.05, limit_rate=0.05, malformed=0.03, retry_after="0") as server,
            connect({"url": server.url, "concurrency": 64, "backoff_s": 0.001}) as model,
        ):
            for _ in range(5):
                await asyncio.gather(*(model.generate(Request([Message("user", "x" * 1000)])) for _ in range(120)))
                server.records.clear()
                gc.collect()
                sizes.append(tracemalloc.get_traced_memory()[0])
        return sizes

    tracemalloc.start()
    try:
        sizes = asyncio.run(run())
    finally:
        tracemalloc.stop()
    assert sizes[-1] - sizes[1] < 100_000, sizes  # 360 calls apart; the latencies kept for quantiles are bounded


def test_unanswerable_calls_are_missing_with_their_reason_and_the_rest_complete():
    async def run():
        async with (
            MisbehavingServer(drop=0.3, error=0.2, malformed=0.2) as server,
            connect({"url": server.url, "concurrency": 64, "retries": 1, "backoff_s": 0.001}) as model,
        ):
            requests = [Request([Message("user", f"call {i}")]) for i in range(300)]
            answers = await asyncio.gather(*map(model.generate, requests), return_exceptions=True)
            return answers, model.stats()

    answers, stats = asyncio.run(run())
    failed = [answer for answer in answers if isinstance(answer, BaseException)]
    assert all(isinstance(error, ModelCallError) for error in failed)
    assert {error.reason for error in failed} <= {"connection", "http_500", "bad_response"}
    assert 0 < len(failed) == stats["failed"] < 300
    for i, answer in enumerate(answers):
        assert isinstance(answer, ModelCallError) or answer[0].text == f"call {i}"
