"""Rate limits are kept."""

import asyncio
import time

from tests.patience import patience
from upshot.config.sampling import Sampling
from upshot.core.conversation import Message
from upshot.models.base import Completion, Request
from upshot.models.client.limits import Pace
from upshot.models.connect import Endpoints, connect
from upshot.models.local import BorrowedModel


def test_calls_per_minute_are_kept():
    async def run():
        options = {"model": "scripted:ok", "requests_per_minute": 1200}
        async with connect(options) as model:
            began = time.monotonic()
            await asyncio.gather(*(model.generate(Request([Message("user", "x")])) for _ in range(30)))
            return time.monotonic() - began

    assert asyncio.run(run()) >= 0.45  # 20 at once, 10 more at 20 a second


def test_tokens_per_minute_are_kept_by_actual_usage():
    def reply(request):
        return Completion("x", "stop", prompt_tokens=50, completion_tokens=50)

    async def run(monkeypatched):
        from upshot.models.scripted import SCRIPTS

        SCRIPTS["limits-test"] = monkeypatched
        try:
            async with connect({"model": "scripted:limits-test", "tokens_per_minute": 60_000}) as model:
                request = Request([Message("user", "x")], Sampling(max_tokens=900))
                began = time.monotonic()
                for _ in range(15):
                    await model.generate(request)
                return time.monotonic() - began
        finally:
            del SCRIPTS["limits-test"]

    # 1,500 tokens at 1,000 a second with 1,000 at once; by the estimates of 900 each it would take 12 s
    assert 0.3 <= asyncio.run(run(reply)) < patience(8)


def test_more_than_the_bucket_holds_is_paid_back():
    async def run():
        pace = Pace(6000)  # 100 a second
        began = time.monotonic()
        await pace.take(130)
        await pace.take(10)
        return time.monotonic() - began

    assert asyncio.run(run()) >= 0.35


def test_a_lent_policy_takes_all_calls_at_once_whatever_the_limit_of_endpoints():
    borrowed = connect("policy", role="judge", policy=connect("scripted:echo"), endpoints=Endpoints())
    assert isinstance(borrowed, BorrowedModel) and borrowed.limits.concurrency == 1_000_000
