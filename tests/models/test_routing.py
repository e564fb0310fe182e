"""Where a call goes: properties that hold for any order of calls, answers, failures, joins and leaves."""

import asyncio
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from upshot.core.conversation import Message
from upshot.core.http_client import AttemptError
from upshot.models.base import Request
from upshot.models.client.limits import CallSlots
from upshot.models.client.routing import FAILURES, LONGEST_PAUSE_S, PAUSE_S, Replica, Routing, pick, prefix_key

URLS = [f"http://127.0.0.1:{port}/v1" for port in range(1, 7)]
KEYS = st.integers(0, 9).map(lambda i: bytes([i]) * 4)


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@given(loads=st.lists(st.integers(0, 40), min_size=1, max_size=6), key=KEYS, slack=st.integers(0, 8))
def test_the_choice_is_never_clearly_more_loaded_than_the_least_loaded(loads, key, slack):
    free = [Replica(url, in_flight=load) for url, load in zip(URLS, loads, strict=False)]
    chosen = pick(free, key, slack)
    assert chosen.in_flight <= min(loads) + slack
    home = pick([Replica(replica.url) for replica in free], key, slack).url
    homely = next(replica for replica in free if replica.url == home)
    assert (chosen is homely) or homely.in_flight > min(loads) + slack


@given(count=st.integers(2, 6), gone=st.integers(0, 5), key=st.binary(min_size=1, max_size=16))
def test_a_replica_that_leaves_moves_only_its_own_conversations(count, gone, key):
    free = [Replica(url) for url in URLS[:count]]
    rest = [replica for i, replica in enumerate(free) if i != gone % count]
    before = pick(free, key, 2)
    if before in rest:
        assert pick(rest, key, 2) is before


def test_homes_are_spread_evenly():
    free = [Replica(url) for url in URLS[:4]]
    counts = [0] * 4
    for i in range(2000):
        counts[free.index(pick(free, str(i).encode(), 2))] += 1
    assert min(counts) > 400


def test_the_prefix_is_the_beginning_of_the_conversation():
    def key(*contents, ids=None):
        roles = ["system", "user", "assistant", "user"]
        return prefix_key(Request(ids or [Message(r, c) for r, c in zip(roles, contents, strict=False)]))

    assert key("s", "a") == key("s", "a", "b", "c")
    assert key("s", "a") != key("s", "b")
    assert key("t", "a") != key("s", "a")
    assert key(ids=list(range(600))) == key(ids=list(range(900)))
    assert key(ids=[1, 2]) != key(ids=[1, 3])


STEPS = st.lists(
    st.tuples(st.sampled_from(["call", "call", "answer", "fail", "limit", "list", "wait"]), st.integers(0, 10**6)),
    max_size=120,
)


@given(steps=STEPS, concurrency=st.integers(1, 4), count=st.integers(1, 4))
@settings(max_examples=150, deadline=None)
def test_a_call_finds_any_free_slot_and_loads_stay_correct(steps, concurrency, count):
    async def run():
        clock = Clock()
        slots = CallSlots(concurrency)
        routing = Routing(concurrency, slots, clock)
        routing.update(URLS[:count])
        held = []
        for step, draw in steps:
            rng = random.Random(draw)
            if step == "call":
                free = [r for r in routing.open_to_calls(()) if r.in_flight < concurrency]
                try:
                    place = routing.take(bytes([draw % 7]) * 4)
                except AttemptError as error:
                    assert not routing.open_to_calls(()) and error.reason in ("connection", "rate_limited")
                else:
                    assert place in free or not free, "where one is free, one of the free takes the call"
                    held += [place] if place else []
            elif step == "list":
                routing.update(rng.sample(URLS, rng.randint(0, 4)))
            elif step == "wait":
                clock.now += rng.choice([0.1, PAUSE_S, 10])
            elif held:
                place = held.pop(rng.randrange(len(held)))
                if step == "answer":
                    place.record_answer()
                elif step == "fail":
                    routing.record_failure(place, AttemptError("connection"))
                elif step == "limit":
                    routing.record_failure(place, AttemptError("rate_limited", wait_s=1.0))
                routing.leave(place)
            for replica in {*held, *routing.replicas.values()}:
                assert replica.in_flight == held.count(replica) <= concurrency
            if step != "call":
                assert slots.bound == concurrency * max(1, routing.up)

    asyncio.run(run())


def test_a_waiting_call_is_told_of_a_free_slot():
    async def run():
        routing = Routing(1, CallSlots(1))
        routing.update(URLS[:1])
        first = routing.take(b"k")
        assert routing.take(b"k") is None
        waiting = [asyncio.create_task(routing.change.wait()) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        routing.leave(first)
        await asyncio.gather(*waiting[1:])
        return routing.take(b"k")

    assert asyncio.run(run()) is not None


def test_a_breaker_opens_after_failures_in_a_row_and_lets_one_trial_through_after_a_pause():
    breaker = Replica(URLS[0])
    for _ in range(FAILURES - 1):
        breaker.record_failure(0.0)
    breaker.record_answer()
    for _ in range(FAILURES - 1):
        breaker.record_failure(0.0)
    assert breaker.takes_calls(0.0)
    for _ in range(20):  # the remaining calls in flight
        breaker.record_failure(0.0)
    assert breaker.opened == 1
    assert not breaker.takes_calls(PAUSE_S - 0.01)
    assert breaker.takes_calls(PAUSE_S)
    breaker.begin(PAUSE_S)
    assert not breaker.takes_calls(PAUSE_S), "one trial at a time"
    breaker.record_failure(PAUSE_S)
    assert not breaker.takes_calls(2.9 * PAUSE_S)
    assert breaker.takes_calls(3 * PAUSE_S)
    breaker.begin(3 * PAUSE_S)
    breaker.record_answer()
    assert breaker.takes_calls(3 * PAUSE_S)
    assert not breaker.is_out
    assert breaker.opened == 1


def test_the_next_call_tries_a_rested_replica_regardless_of_its_home():
    for url in URLS[:3]:
        clock = Clock()
        routing = Routing(4, CallSlots(4), clock)
        routing.update(URLS[:3])
        routing.put_out(url)
        assert routing.take(b"k").url != url
        clock.now += PAUSE_S
        trial = routing.take(b"k")
        assert trial.url == url
        assert routing.take(b"k").url != url, "one trial at a time"
        trial.record_answer()
        assert routing.up == 3


def test_the_pause_of_a_breaker_is_bounded():
    breaker, now = Replica(URLS[0]), 0.0
    breaker.put_out(now)
    for _ in range(20):
        now += LONGEST_PAUSE_S
        assert breaker.takes_calls(now)
        breaker.begin(now)
        breaker.record_failure(now)


def test_slots_admit_as_many_as_the_changing_bound_allows():
    async def run():
        slots, inside, most = CallSlots(2), 0, []

        async def work():
            nonlocal inside
            await slots.acquire()
            inside += 1
            most.append((inside, slots.bound))
            await asyncio.sleep(0)
            inside -= 1
            slots.release()

        tasks = [asyncio.create_task(work()) for _ in range(40)]
        await asyncio.sleep(0)
        tasks[5].cancel()
        slots.resize(5)
        tasks[3].cancel()  # admitted by the line above but not yet inside
        await asyncio.sleep(0)
        slots.resize(1)
        await asyncio.gather(*tasks, return_exceptions=True)
        assert slots.held == 0
        return most

    most = asyncio.run(run())
    assert len(most) == 38
    assert 2 < max(inside for inside, _ in most) <= 5
    assert most[-1] == (1, 1)


def test_a_process_keeps_its_share_of_the_slots_when_the_bound_changes():
    async def run():
        slots = CallSlots(8)
        slots.share(4)
        for bound, share in ((8, 2), (24, 6), (3, 1)):  # one replica, three, and a breaker that leaves few
            slots.resize(bound)
            calls = [asyncio.create_task(slots.acquire()) for _ in range(10)]
            await asyncio.sleep(0)
            assert slots.held == share
            for _ in calls:
                await asyncio.sleep(0)
                slots.release()
            await asyncio.gather(*calls)
            assert slots.held == 0

    asyncio.run(run())
