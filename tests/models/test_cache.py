"""The response cache answers repeated requests, for several processes at once, and never stores a failure."""

import asyncio
import multiprocessing
import sqlite3
from contextlib import closing

import pytest

from upshot.config.sampling import Sampling
from upshot.core.conversation import Message
from upshot.core.errors import UserError
from upshot.models.base import Completion, ModelCallError, Request
from upshot.models.client.budget import Budget
from upshot.models.client.cache import ResponseCache, decode, encode, request_key
from upshot.models.connect import connect


def ask(text="hi", n=1, **sampling):
    return Request([Message("user", text)], Sampling(**sampling), n=n)


CALLS: list[str] = []


def numbered(request):
    """A script that never returns the same text twice."""
    if request.prompt[-1].content == "fail":
        raise ModelCallError("http_500")
    CALLS.append(request.prompt[-1].content)
    return f"reply {len(CALLS)}"


def session(folder, requests, budget=None, **spec):
    """One run that sends all requests in order: the texts, how many were really sent, the counters."""

    async def run():
        before = len(CALLS)
        options = {"model": "scripted:tests.models.test_cache:numbered", "cache": str(folder), **spec}
        async with connect(options, budget=budget) as model:
            out = [[c.text for c in await model.generate(request)] for request in requests]
            return out, len(CALLS) - before, model.stats()

    return asyncio.run(run())


def test_completions_survive_the_disk():
    whole = Completion(
        "a\\frac “é”", "stop", (1, 2), (-0.5, -1.0), ({"id": "x"},), 3, 2, 0.1, 4, False, (((1, -0.5),), ((2, -1.0),))
    )
    back = decode(encode(whole))
    assert back.cached
    assert back.cost == 0
    assert (back.text, back.ids, back.logprobs, back.tool_calls) == (
        "a\\frac “é”",
        (1, 2),
        (-0.5, -1.0),
        ({"id": "x"},),
    )
    assert (back.prompt_tokens, back.completion_tokens, back.version) == (3, 2, 4)
    assert back.top_logprobs == whole.top_logprobs
    assert decode(encode(Completion("", "length"))) == Completion("", "length", cached=True)


def test_the_cache_key_depends_on_everything_that_changes_the_answer():
    base = Request([Message("user", "hi")], Sampling(seed=1))
    variants = [
        base,
        Request([Message("system", "hi")], Sampling(seed=1)),
        Request([Message("user", "hi")], Sampling(seed=2)),
        Request([Message("user", "hi")], Sampling(seed=1, temperature=0.5)),
        Request([Message("user", "hi")], Sampling(seed=1), schema={"type": "object"}),
        Request([1, 2], Sampling(seed=1)),
    ]
    keys = {request_key("m", request) for request in variants} | {request_key("other", base)}
    keys.add(request_key("m", base, {"thinking": False}))
    assert len(keys) == len(variants) + 2
    same = Request((Message("user", "hi"),), Sampling(seed=1), n=3, role="judge")
    assert request_key("m", same) == request_key("m", base)


def test_a_second_run_sends_no_request_again_and_spends_no_budget(tmp_path):
    requests = [ask("a", seed=1), ask("b", temperature=0.0), ask("c", n=3, seed=2), ask("d")]
    first, asked, _ = session(tmp_path, requests)
    assert asked == 6
    budget = Budget(max_calls=0)
    second, asked, stats = session(tmp_path, requests, budget)
    assert (second, asked, budget.calls) == (first, 0, 0)
    assert stats["cache_hits"] == 6
    assert stats["cache_hit_rate"] == 1
    assert stats["calls"] == 0


def test_a_repeated_request_without_a_seed_gets_a_new_sample(tmp_path):
    first, asked, _ = session(tmp_path, [ask()] * 4)
    assert asked == len({text for (text,) in first}) == 4
    second, asked, _ = session(tmp_path, [ask()] * 5)
    assert second[:4] == first
    assert asked == 1


def test_if_too_few_samples_are_stored_only_the_rest_are_requested(tmp_path):
    first, _, _ = session(tmp_path, [ask(n=2)])
    second, asked, stats = session(tmp_path, [ask(n=5)])
    assert second[0][:2] == first[0]
    assert len(set(second[0])) == 5
    assert asked == 3
    assert stats["cache_hit_rate"] == pytest.approx(0.4)


def test_greedy_and_seeded_answers_are_requested_once(tmp_path):
    texts, asked, _ = session(tmp_path, [ask(seed=5), ask(seed=5), ask(temperature=0.0), ask(temperature=0.0)])
    assert asked == 2
    assert texts[0] == texts[1]
    assert texts[2] == texts[3]


def test_models_do_not_share_answers(tmp_path):
    session(tmp_path, [ask(seed=1)])
    texts, _, _ = session(tmp_path, [ask(seed=1)], model="scripted:echo")
    assert texts == [["hi"]]


def test_failures_are_not_stored(tmp_path):
    for _ in range(2):
        with pytest.raises(ModelCallError):
            session(tmp_path, [ask("fail", seed=1)])
    assert stored(tmp_path) == []


def write_and_read(folder, worker):
    cache = ResponseCache.open(folder)
    for i in range(200):
        cache.put(i.to_bytes(4, "big"), 0, Completion(f"{worker}:{i}", "stop"), "m")
        found = cache.get(i.to_bytes(4, "big"), 0)
        assert found is not None
        assert found.text.endswith(f":{i}")
    cache.close()


def test_of_several_processes_writing_at_once_the_first_wins(tmp_path):
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=write_and_read, args=(tmp_path, w)) for w in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * 4
    ((model, count, size),) = stored(tmp_path)
    assert (model, count) == ("m", 200)
    assert size > 0


def test_a_connection_does_not_cross_a_fork(tmp_path):
    cache = ResponseCache.open(tmp_path)
    cache.put(b"k", 0, Completion("before", "stop"))
    context = multiprocessing.get_context("fork")
    child = context.Process(target=cache.put, args=(b"k2", 0, Completion("child", "stop")))
    child.start()
    child.join()
    found = cache.get(b"k2", 0)
    assert found is not None
    assert found.text == "child"


def test_a_file_that_is_not_a_cache_is_named(tmp_path):
    (tmp_path / "responses.sqlite").write_bytes(b"not a database, but long enough to look at" * 50)
    with pytest.raises(UserError, match="cannot use the response cache"):
        ResponseCache.open(tmp_path)


def stored(folder):
    """(model, completions, bytes) in the cache of a folder."""
    with closing(sqlite3.connect(folder / "responses.sqlite")) as connection:
        return connection.execute(
            "SELECT model, COUNT(*), SUM(LENGTH(data)) FROM completions GROUP BY model"
        ).fetchall()
