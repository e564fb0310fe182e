"""A model at several addresses: calls go where there is capacity, and elsewhere if a replica is slow, failing or
gone."""

import asyncio
import logging
import time
from collections import Counter
from contextlib import AsyncExitStack

import pytest

from tests.models.misbehaving_server import MisbehavingServer
from tests.patience import patience, until
from upshot.config.sampling import Sampling
from upshot.core.conversation import Message
from upshot.core.errors import UserError
from upshot.models.base import ModelCallError, Request
from upshot.models.client import replicas as replicated
from upshot.models.client import routing as routing_module
from upshot.models.client.budget import Budget
from upshot.models.client.replicas import short_name
from upshot.models.connect import connect, connect_all


def ask(i, n=1):
    return Request([Message("user", f"question {i}")], Sampling(seed=i), n=n)


async def servers(stack, *faults):
    """Servers started in the order of their faults."""
    return [await stack.enter_async_context(MisbehavingServer(**fault)) for fault in faults]


def spec_of(*urls, **options):
    return {"url": list(urls), "backoff_s": 0.02, **options}


def port_of(server):
    return int(server.url.rsplit(":", 1)[1].removesuffix("/v1"))


def test_every_call_is_answered_once_though_replicas_drop_garble_and_fail():
    calls = 400

    async def run():
        budget = Budget()
        async with AsyncExitStack() as stack:
            there = await servers(stack, {"drop": 0.1, "malformed": 0.05}, {"error": 0.15, "limit_rate": 0.05}, {})
            spec = spec_of(*(s.url for s in there), concurrency=32, price_in=1, price_out=1)
            model = await stack.enter_async_context(connect(spec, role="user", budget=budget))
            answers = await asyncio.gather(*(model.generate(ask(i, 1 + i % 2)) for i in range(calls)))
            return there, budget, answers, model.stats(), [short_name(server.url) for server in there]

    there, budget, answers, stats, names = asyncio.run(run())
    assert [{c.text for c in answer} for answer in answers] == [{f"question {i}"} for i in range(calls)]
    served = [record.body["seed"] for server in there for record in server.served()]
    assert sorted(served) == list(range(calls)), "each call was served exactly once, with its own seed"
    assert all(server.most_in_flight <= 32 for server in there)
    assert stats["user/calls"] == budget.calls == calls
    assert stats["user/failed"] == 0
    assert budget.tokens == stats["user/prompt_tokens"] + stats["user/completion_tokens"]
    attempts = sum(sum(server.outcomes.values()) for server in there)
    assert stats["user/retries"] == attempts - calls
    assert [stats[f"user/replica/{n}/calls"] for n in names] == [sum(s.outcomes.values()) for s in there]


def test_calls_of_a_killed_replica_are_answered_elsewhere_and_it_is_used_again_when_back(monkeypatch):
    monkeypatch.setattr(routing_module, "PAUSE_S", 0.05)

    async def run():
        async with AsyncExitStack() as stack:
            [stays] = await servers(stack, {"latency": 0.005})
            goes = MisbehavingServer(latency=0.05)
            await goes.__aenter__()
            port = port_of(goes)
            model = await stack.enter_async_context(connect(spec_of(stays.url, goes.url, concurrency=16), role="user"))
            running = asyncio.gather(*(model.generate(ask(i)) for i in range(300)))
            await until(lambda: goes.in_flight > 4)
            await goes.__aexit__()
            first = await running
            down = model.stats()
            back = await stack.enter_async_context(MisbehavingServer(port=port))
            more = []
            while not back.served():
                more += await asyncio.gather(*(model.generate(ask(300 + len(more) + i)) for i in range(20)))
                await asyncio.sleep(0.02)
            await asyncio.gather(*(model.generate(ask(5000 + i)) for i in range(50)))
            return first, down, more, [stays, goes, back], model.stats(), short_name(back.url)

    first, down, more, there, stats, name = asyncio.run(run())
    assert [answer[0].text for answer in [*first, *more]] == [f"question {i}" for i in range(300 + len(more))]
    counted = Counter(record.body["seed"] for server in there for record in server.served())
    assert set(counted.values()) == {1}
    assert len(counted) == 350 + len(more)
    assert down["user/failed"] == 0
    assert down["user/retries/connection"] >= 1
    assert down[f"user/replica/{name}/opened"] == 1
    assert down["user/replicas_up"] == 1
    assert stats["user/replicas_up"] == 2
    assert len(there[2].served()) > 5


def test_a_replica_that_hangs_is_excluded_by_its_timeouts_and_used_again_when_it_answers(monkeypatch):
    monkeypatch.setattr(routing_module, "PAUSE_S", 0.3)

    async def run():
        async with AsyncExitStack() as stack:
            hangs, *_ = there = await servers(stack, {}, {}, {})
            spec = spec_of(*(s.url for s in there), timeout_s=patience(0.5))
            model = await stack.enter_async_context(connect(spec, role="user"))
            for i in range(20):
                await model.generate(ask(i))
            hangs.latency = 600  # as after SIGSTOP: it accepts calls and answers none
            answers = await asyncio.gather(*(model.generate(ask(i)) for i in range(200, 240)))
            out = model.stats()
            hangs.latency = 0
            while model.stats()["user/replicas_up"] < 3:  # tried again after the pause
                await model.generate(ask(0))
                await asyncio.sleep(0.01)
            return answers, out, model.stats(), short_name(hangs.url)

    answers, out, stats, name = asyncio.run(run())
    assert [answer[0].text for answer in answers] == [f"question {i}" for i in range(200, 240)]
    assert out[f"user/replica/{name}/opened"] == 1 and out["user/replicas_up"] == 2
    assert stats["user/failed"] == 0


def test_no_call_is_sent_twice_if_answers_become_slow():
    async def run():
        async with AsyncExitStack() as stack:
            there = await servers(stack, {}, {})
            model = await stack.enter_async_context(connect(spec_of(*(s.url for s in there)), role="user"))
            for i in range(30):
                await model.generate(ask(i))
            there[0].latency = there[1].latency = 0.02
            await asyncio.gather(*(model.generate(ask(100 + i)) for i in range(70)))
            return sum(len(server.records) for server in there)

    assert asyncio.run(run()) == 100


def test_a_conversation_stays_where_its_prefix_is():
    async def run():
        async with AsyncExitStack() as stack:
            there = await servers(stack, {}, {}, {})
            model = await stack.enter_async_context(connect(spec_of(*(s.url for s in there))))
            homes = {}
            for i in range(30):
                turns = [Message("system", "be brief"), Message("user", f"question {i}")]
                for turn in range(3):
                    await model.generate(Request(list(turns)))
                    turns += [Message("assistant", f"answer {turn}"), Message("user", f"and {turn}?")]
            for number, server in enumerate(there):
                for record in server.served():
                    homes.setdefault(record.body["messages"][1]["content"], []).append(number)
            return homes

    homes = asyncio.run(run())
    assert len(homes) == 30
    assert all(len(seen) == 3 and len(set(seen)) == 1 for seen in homes.values())
    assert {seen[0] for seen in homes.values()} == {0, 1, 2}


def test_one_busy_prefix_is_spread_when_its_home_is_clearly_more_loaded():
    async def run():
        async with AsyncExitStack() as stack:
            there = await servers(stack, {"latency": patience(0.1)}, {"latency": patience(0.1)})
            model = await stack.enter_async_context(connect(spec_of(*(s.url for s in there), concurrency=16)))
            await asyncio.gather(*(model.generate(ask(1)) for _ in range(24)))
            return sorted(server.most_in_flight for server in there)

    low, high = asyncio.run(run())
    assert low + high == 24
    assert high - low <= 3


def test_when_all_replicas_are_dead_the_call_fails_with_the_usual_reason_and_works_again_when_one_is_back():
    async def run():
        there = [MisbehavingServer(), MisbehavingServer()]
        for server in there:
            await server.__aenter__()
        urls = [server.url for server in there]
        ports = [port_of(server) for server in there]
        async with connect(spec_of(*urls, retries=2, backoff_s=0.01), role="user") as model:
            await model.generate(ask(0))
            for server in there:
                await server.__aexit__()
            failures = await asyncio.gather(*(model.generate(ask(i)) for i in range(8)), return_exceptions=True)
            stats = model.stats()
            async with MisbehavingServer(port=ports[1]):
                # the breakers are still open, but there is no other replica
                answers = await asyncio.gather(*(_patient(model, i) for i in range(4)))
            return failures, stats, answers

    failures, stats, answers = asyncio.run(run())
    assert [type(failure) for failure in failures] == [ModelCallError] * 8
    assert {failure.reason for failure in failures} == {"connection"}
    assert stats["user/failed/connection"] == 8
    assert stats["user/replicas_up"] == 0
    assert [answer[0].text for answer in answers] == [f"question {i}" for i in range(4)]


async def _patient(model, i):
    while True:
        try:
            return await model.generate(ask(i))
        except ModelCallError:
            await asyncio.sleep(0.1)


def test_a_run_begins_without_a_dead_replica_and_uses_it_later(monkeypatch, caplog):
    monkeypatch.setattr(routing_module, "PAUSE_S", 60.0)

    async def run():
        async with AsyncExitStack() as stack:
            [there] = await servers(stack, {})
            late = MisbehavingServer()
            await late.__aenter__()
            url, port = late.url, port_of(late)
            await late.__aexit__()
            model = await stack.enter_async_context(connect(spec_of(there.url, url), role="user"))
            await asyncio.gather(*(model.generate(ask(i)) for i in range(20)))
            before = model.stats()
            monkeypatch.setattr(model.routing, "_clock", lambda: time.monotonic() + 60)  # the pause is over
            late = await stack.enter_async_context(MisbehavingServer(port=port))
            while not late.served():
                await asyncio.gather(*(model.generate(ask(i)) for i in range(20)))
                await asyncio.sleep(0.02)
            return before, url

    with caplog.at_level(logging.WARNING):
        before, url = asyncio.run(run())
    assert f"continues without a replica: cannot reach {url}" in caplog.text
    assert before["user/retries"] == before["user/failed"] == 0, "no call had to find out"


def test_no_reachable_replica_is_reported_before_any_work():
    async def run():
        async with connect(spec_of("http://127.0.0.1:9/v1", "http://127.0.0.1:10/v1", retries=1)):
            pass

    with pytest.raises(UserError, match=r"no replica of .* can be used: cannot reach http://127.0.0.1:9/v1"):
        asyncio.run(run())


def test_replicas_that_serve_different_models_are_refused():
    async def run():
        async with AsyncExitStack() as stack:
            there = await servers(stack, {"models": ("one",)}, {"models": ("other",)})
            await stack.enter_async_context(connect(spec_of(*(s.url for s in there))))

    with pytest.raises(UserError, match="differ; serve the same model"):
        asyncio.run(run())


def test_a_file_of_addresses_is_followed_while_calls_go_on(tmp_path, monkeypatch):
    monkeypatch.setattr(replicated, "REFRESH_S", 0.02)
    file = tmp_path / "replicas.txt"

    async def run():
        async with AsyncExitStack() as stack:
            first, second = await servers(stack, {"latency": 0.005}, {"latency": 0.005})
            file.write_text(f"# ours\n{first.url}\n\n")
            spec = {"url": str(file), "concurrency": 4}
            model = await stack.enter_async_context(connect(spec, role="user"))
            running = asyncio.gather(*(model.generate(ask(i)) for i in range(400)))
            await until(lambda: len(first.served()) > 20)
            assert not second.records
            file.write_text(f"{first.url}\n{second.url}\n")
            await until(lambda: len(second.served()) > 20)
            file.write_text(f"{second.url}\n")
            await until(lambda: list(model.routing.replicas) == [second.url])
            asked = len(first.records)
            answers = await running
            file.write_text("")  # a half-written or missing file changes nothing
            await asyncio.sleep(0.05)
            await model.generate(ask(1000))
            file.unlink()
            await asyncio.sleep(0.05)
            await model.generate(ask(1001))
            return answers, len(first.records) - asked, [first, second], model.stats()

    answers, asked_after_leaving, there, stats = asyncio.run(run())
    assert [answer[0].text for answer in answers] == [f"question {i}" for i in range(400)]
    assert asked_after_leaving <= 4, "only what was on its way"
    assert sorted(r.body["seed"] for s in there for r in s.served()) == [*range(400), 1000, 1001]
    assert all(server.most_in_flight <= 4 for server in there)
    assert stats["user/retries"] == stats["user/failed"] == 0


def test_a_file_without_addresses_or_with_a_wrong_one_is_refused(tmp_path):
    async def run(url):
        async with connect({"url": str(url), "retries": 0}):
            pass

    file = tmp_path / "replicas.txt"
    file.write_text("localhost:8000\n")
    with pytest.raises(UserError, match="names the replica 'localhost:8000', which is not a URL"):
        asyncio.run(run(file))
    file.write_text("# none yet\n")
    with pytest.raises(UserError, match="lists no replica"):
        asyncio.run(run(file))
    with pytest.raises(UserError, match=r"cannot read '.*absent'.*begins with http://"):
        asyncio.run(run(tmp_path / "absent"))


def test_roles_that_name_the_same_replicas_share_their_slots():
    async def run():
        async with AsyncExitStack() as stack:
            there = await servers(stack, {"latency": 0.02}, {"latency": 0.02})
            spec = spec_of(*(s.url for s in there), concurrency=3)
            models = connect_all({"user": spec, "judge": {**spec, "temperature": 0}})
            for model in models.values():
                await stack.enter_async_context(model)
            await asyncio.gather(*(model.generate(ask(i)) for model in models.values() for i in range(20)))
            return [server.most_in_flight for server in there], {k: m.stats() for k, m in models.items()}

    most, stats = asyncio.run(run())
    assert most == [3, 3]
    assert stats["user"]["user/calls"] == stats["judge"]["judge/calls"] == 20


@pytest.mark.parametrize("fault", [{"latency": 30}, {"limit_rate": 1.0, "retry_after": "30"}, {"error": 1.0}])
def test_closing_ends_calls_in_flight_queued_and_between_attempts(fault):
    async def run():
        async with AsyncExitStack() as stack:
            there = await servers(stack, fault, fault)
            model = connect(spec_of(*(s.url for s in there), concurrency=2, backoff_s=20))
            await model.start()
            calls = asyncio.gather(*(model.generate(ask(i)) for i in range(8)), return_exceptions=True)
            await until(lambda: sum(len(s.records) for s in there) >= 4)
            await model.aclose()
            return await calls

    outcomes = asyncio.run(run())
    assert {outcome.reason for outcome in outcomes} == {"closed"}


def test_cancelled_calls_release_their_slots():
    async def run():
        async with AsyncExitStack() as stack:
            there = await servers(stack, {}, {})
            model = await stack.enter_async_context(connect(spec_of(*(s.url for s in there), concurrency=2)))
            for i in range(25):
                await model.generate(ask(i))
            there[0].latency = there[1].latency = 30
            for wait in (0, 0.001, 0.01, 0.05):
                calls = asyncio.gather(*(model.generate(ask(i)) for i in range(10)))
                await asyncio.sleep(wait)
                calls.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await calls
            await until(lambda: model.limits.slots.held == 0)
            assert [replica.in_flight for replica in model.routing.replicas.values()] == [0, 0]
            there[0].latency = there[1].latency = 0
            await asyncio.gather(*(model.generate(ask(i)) for i in range(10)))

    asyncio.run(run())


def test_requests_do_not_depend_on_the_number_of_replicas():
    async def run(count):
        async with AsyncExitStack() as stack:
            there = await servers(stack, *({} for _ in range(count)))
            model = await stack.enter_async_context(connect(spec_of(*(s.url for s in there))))
            await asyncio.gather(*(model.generate(ask(i, 2)) for i in range(30)))
            bodies = [record.body for server in there for record in server.records]
            return sorted(bodies, key=lambda body: body["seed"])

    async def one():
        async with MisbehavingServer() as server, connect({"url": server.url}) as model:
            await asyncio.gather(*(model.generate(ask(i, 2)) for i in range(30)))
            return sorted((record.body for record in server.records), key=lambda body: body["seed"])

    assert asyncio.run(one()) == asyncio.run(run(3))


def test_an_answer_is_found_in_the_cache_whichever_replica_gave_it(tmp_path):
    async def run():
        async with AsyncExitStack() as stack:
            there = await servers(stack, {}, {})
            spec = spec_of(*(s.url for s in there), cache=str(tmp_path))
            for _ in range(2):
                async with connect(spec, role="user") as model:
                    await asyncio.gather(*(model.generate(ask(i)) for i in range(20)))
            return sum(len(server.records) for server in there), model.stats()

    sent, stats = asyncio.run(run())
    assert sent == 20
    assert stats["user/cache_hits"] == 20


def test_a_call_that_one_replica_refuses_is_not_tried_on_another():
    async def run():
        async with AsyncExitStack() as stack:
            there = await servers(stack, {"structured": False}, {"structured": False})
            spec = spec_of(*(s.url for s in there), structured=True)
            model = await stack.enter_async_context(connect(spec, role="user"))
            with pytest.raises(ModelCallError, match="http_400"):
                await model.generate(Request([Message("user", "hi")], schema={"type": "object"}))
            return sum(len(server.records) for server in there), model.stats()

    sent, stats = asyncio.run(run())
    assert sent == 1
    assert stats["user/replicas_up"] == 2


def test_counters_continue_after_a_resume():
    async def run():
        async with AsyncExitStack() as stack:
            there = await servers(stack, {}, {})
            spec = spec_of(*(s.url for s in there))
            model = await stack.enter_async_context(connect(spec, role="user"))
            await asyncio.gather(*(model.generate(ask(i)) for i in range(10)))
            again = await stack.enter_async_context(connect(spec, role="user"))
            again.restore(model.state())
            await asyncio.gather(*(again.generate(ask(i)) for i in range(10)))
            return [again.stats()[f"user/replica/{short_name(s.url)}/calls"] for s in there]

    assert sum(asyncio.run(run())) == 20


def test_a_late_replica_that_serves_another_model_is_not_used(monkeypatch):
    monkeypatch.setattr(routing_module, "PAUSE_S", 0.01)

    async def run():
        async with AsyncExitStack() as stack:
            [there] = await servers(stack, {"models": ("one",)})
            async with MisbehavingServer() as late:
                url, port = late.url, port_of(late)
            model = await stack.enter_async_context(connect(spec_of(there.url, url), role="user"))
            late = await stack.enter_async_context(MisbehavingServer(models=("other",), port=port))
            for i in range(30):
                await model.generate(ask(i))
                await asyncio.sleep(0.005)
            return late, model.stats(), short_name(url)

    late, stats, name = asyncio.run(run())
    assert not late.records
    assert stats[f"user/replica/{name}/failed"] >= 1, "it was looked at"
    assert stats["user/failed"] == 0
