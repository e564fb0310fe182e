"""The simulation behind `benchmarks/cluster_sim.py`, compared with queueing theory and with properties of any step."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.cluster_sim import main, site_of
from benchmarks.sim.clock import Clock, Pace, Process, Slots, Thread
from benchmarks.sim.fleet import Fleet, needed, part_of, smallest
from benchmarks.sim.servers import Endpoint, Limits, Pool, Server
from benchmarks.sim.site import EndpointSite, Length, Site, Speed
from benchmarks.sim.step import play
from benchmarks.sim.work import POLICY, Work, work_of
from upshot.config.load import load_recipe
from upshot.core.errors import UserError

TALK = Work(prompts=4, group=2, max_tokens=200, samples=2, rounds=2, user="user", judges=(("judge",), ("judge",)))


def site(**sections: Any) -> Site:
    """A site without failures, of short replies."""
    quick = {"policy": {"reply_tokens": {"median": 50, "sigma": 0.5}}, "failures": {"gpu_hours": 0}}
    workers = {"poll_s": 0, **sections.pop("workers", {})}
    return Site.model_validate({**quick, **sections, "workers": workers})


def hosted(seconds: float, sigma: float = 0.0, **more: Any) -> dict[str, Any]:
    """An endpoint of a given latency."""
    return {"latency_s": {"median": seconds, "sigma": sigma}, **more}


# --- queues -----------------------------------------------------------------------------------------------------------


def customers(clock: Clock, count: int, rate: float, rng: random.Random, serve: Any) -> list[float]:
    """Poisson arrivals; how long each customer stayed."""
    stays: list[float] = []

    def one() -> Process:
        began = clock.now
        yield from serve()
        stays.append(clock.now - began)

    def arrivals() -> Process:
        for _ in range(count):
            yield clock.sleep(rng.expovariate(rate))
            clock.start(one())

    clock.start(arrivals())
    clock.run()
    return stays


def erlang_c(servers: int, load: float) -> float:
    """The probability of waiting in an M/M/c queue with this offered load."""
    terms = [load**k / math.factorial(k) for k in range(servers)]
    last = load**servers / math.factorial(servers) * servers / (servers - load)
    return last / (sum(terms) + last)


@pytest.mark.parametrize(("servers", "load"), [(1, 0.5), (4, 2.4)])
def test_slots_wait_as_erlang_c_says(servers: int, load: float) -> None:
    clock, rng, waited = Clock(), random.Random(1), []
    slots = Slots(clock, servers)

    def serve() -> Process:
        came = clock.now
        yield slots.take()
        waited.append(clock.now - came)
        yield clock.sleep(rng.expovariate(1.0))
        slots.give()

    customers(clock, 20_000, load, rng, serve)
    chance = erlang_c(servers, load)
    assert sum(wait > 0 for wait in waited) / len(waited) == pytest.approx(chance, rel=0.1)
    assert sum(waited) / len(waited) == pytest.approx(chance / (servers - load), rel=0.2)
    assert sum(waited) == pytest.approx(slots.waiting_s)


@pytest.mark.parametrize("sigma", [0.0, 0.8])
def test_a_server_that_only_shares_stays_as_processor_sharing_says(sigma: float) -> None:
    clock, rng = Clock(), random.Random(2)
    server = Server(clock, Speed(fixed_s=0, per_sequence_s=0.01, max_running=10_000, prompt_tokens_per_s=1e12))
    load, mean = 0.6, 100.0
    median = mean / math.exp(sigma**2 / 2)

    def serve() -> Process:
        yield server.generate(0, median * math.exp(sigma * rng.gauss(0, 1)))

    stays = customers(clock, 15_000, load, rng, serve)  # one second of work each, for any distribution
    assert sum(stays) / len(stays) == pytest.approx(1 / (1 - load), rel=0.1)
    assert server.busy_s / clock.now == pytest.approx(load, rel=0.05)


def test_littles_law_holds_for_the_calls_of_an_endpoint() -> None:
    clock, rng = Clock(), random.Random(3)
    endpoint = Endpoint(clock, EndpointSite.model_validate(hosted(0.5, 1.0, fails=0.2)), Limits(concurrency=3))

    def serve() -> Process:
        yield from endpoint.call(rng)

    stays = customers(clock, 2_000, 4.0, rng, serve)
    slots = endpoint.slots
    assert slots.inside_s + slots.waiting_s == pytest.approx(sum(stays))  # L·T = λ·T·W
    assert slots.held == slots.line == 0


def test_one_thread_does_one_thing_at_a_time() -> None:
    clock = Clock()
    thread = Thread(clock)

    def work() -> Process:
        yield thread.work(0.5)

    for _ in range(6):
        clock.start(work())
    assert clock.run() == pytest.approx(3.0) and thread.busy_s == pytest.approx(3.0)


def test_a_rate_limit_admits_one_second_of_calls_and_then_its_rate() -> None:
    clock = Clock()
    pace, went = Pace(clock, per_minute=600), []

    def go() -> Process:
        yield pace.take()
        went.append(clock.now)

    for _ in range(50):
        clock.start(go())
    clock.run()
    assert sum(t == 0 for t in went) == 10
    assert went[-1] == pytest.approx(4.0)


def test_a_long_prompt_delays_requests_that_decode() -> None:
    clock = Clock()
    server = Server(clock, Speed(fixed_s=0.1, per_sequence_s=0, prompt_tokens_per_s=100, max_running=8))
    ended = {}

    def one(name: str, at: float, prompt: float) -> Process:
        yield clock.sleep(at)
        yield server.generate(prompt, 10)
        ended[name] = clock.now

    clock.start(one("first", 0.0, 0))
    clock.start(one("second", 0.5, 200))
    clock.run()
    assert ended == pytest.approx({"first": 3.0, "second": 3.5})


@given(st.lists(st.tuples(st.integers(0, 6), st.booleans()), max_size=60))
def test_the_least_loaded_server_is_found(changes: list[tuple[int, bool]]) -> None:
    pool = Pool(Clock(), Speed(), 7)
    for index, more in changes:
        server = pool.servers[index]
        if more or server.load:
            by = 1 if more else -1
            server.load += by
            pool.changed(server, by)
        assert pool.least().load == min(server.load for server in pool.servers)


jobs = st.lists(st.floats(0.01, 5.0), min_size=1, max_size=25)


def makespan(lengths: list[float], bound: int) -> float:
    clock = Clock()
    slots = Slots(clock, bound)

    def one(seconds: float) -> Process:
        yield slots.take()
        yield clock.sleep(seconds)
        slots.give()

    for length in lengths:
        clock.start(one(length))
    return clock.run()


@given(jobs, st.integers(1, 8), st.floats(1.0, 3.0))
def test_more_slots_and_shorter_calls_never_take_longer(lengths: list[float], bound: int, slower: float) -> None:
    took = makespan(lengths, bound)
    assert makespan(lengths, bound + 1) <= took + 1e-9
    assert makespan([slower * length for length in lengths], bound) == pytest.approx(slower * took)
    assert max(max(lengths), sum(lengths) / bound) <= took + 1e-9 <= sum(lengths) / bound + max(lengths) + 1e-6


# --- steps ------------------------------------------------------------------------------------------------------------

works = st.builds(
    Work,
    prompts=st.integers(1, 4),
    group=st.integers(1, 3),
    max_tokens=st.integers(1, 100),
    turns=st.integers(1, 3),
    samples=st.integers(1, 3),
    rounds=st.integers(0, 2),
    user=st.sampled_from(["user", POLICY, None]),
    judges=st.lists(st.lists(st.sampled_from(["judge", "user"]), min_size=1, max_size=2).map(tuple), max_size=2).map(
        tuple
    ),
    classmates=st.lists(st.sampled_from(["peer", "judge"]), max_size=2).map(tuple),
).map(lambda work: replace(work, every_turn=work.rounds == 2))
sites = st.builds(
    lambda latency, fails, workers, call_s, leaves: site(
        helpers={"user": hosted(latency, 1.0, fails=fails), "peer": {"server": {"max_running": 2}}},
        workers={"count": workers, "in_flight": 2, "call_s": call_s},
        leaves=leaves,
    ),
    st.floats(0, 3),
    st.sampled_from([0.0, 0.5]),
    st.integers(1, 3),
    st.sampled_from([0.0, 0.01]),
    st.sampled_from([0.0, 0.3]),
)


@settings(max_examples=30, deadline=None)
@given(works, sites, st.integers(1, 9))
def test_every_reply_ends_once_and_its_parts_add_up(work: Work, somewhere: Site, gpus: int) -> None:
    step = play(work, somewhere, gpus)
    assert len(step.replies) == work.replies
    assert max(reply.ended for reply in step.replies) == pytest.approx(step.rollout)
    for reply in step.replies:
        assert reply.tokens >= work.turns and reply.tokens <= work.turns * work.max_tokens
        assert sum(reply.parts.values()) <= reply.ended + 1e-6
    assert all(0 <= share <= 1 + 1e-6 for share in step.busy.values())
    if not somewhere.leaves and not somewhere.helper("user").fails:
        assert step.calls == work.calls()
    assert play(work, somewhere, gpus) == step  # a seed is a step


@settings(max_examples=25, deadline=None)
@given(works, st.integers(1, 4), st.floats(0.1, 2.0))
def test_waiting_makes_no_reply_faster(work: Work, bound: int, latency: float) -> None:
    helpers = {name: hosted(latency, 0.7) for name in ("user", "judge", "peer")}
    somewhere = site(helpers=helpers, policy={"server": {"per_sequence_s": 0, "prompt_tokens_per_s": 1e9}})
    free = replace(work, limits={name: Limits(concurrency=10**6) for name in helpers})
    tight = replace(work, limits={name: Limits(concurrency=bound) for name in helpers})
    # Not to the last digit: a request that waits leaves the servers' next round to others (Graham's anomaly).
    assert play(free, somewhere, 8).rollout <= 1.02 * play(tight, somewhere, 8).rollout + 0.1


def test_without_queues_a_step_takes_its_longest_chain() -> None:
    work = replace(TALK, max_tokens=10)
    somewhere = site(
        policy={
            "reply_tokens": 10,
            "server": {"fixed_s": 0.1, "per_sequence_s": 0, "prompt_tokens_per_s": 1e12},
        },
        helpers={"user": hosted(2.0), "judge": hosted(3.0)},
        workers={"call_s": 0},
    )
    step = play(work, somewhere, 4)
    assert step.rollout == pytest.approx(3 * 1.0 + 2 * 2.0 + 3.0)
    assert step.replies[0].parts == pytest.approx({POLICY: 3.0, "user": 4.0, "judge": 3.0})
    assert step.tail == pytest.approx(0)


def test_verl_notices_finished_replies_only_when_it_looks() -> None:
    at_once, looking = (play(TALK, site(workers={"poll_s": poll}), 8) for poll in (0, 2))
    assert looking.rollout == 2 * math.ceil(at_once.rollout / 2) and looking.tail == at_once.tail


def test_an_endpoint_that_always_fails_makes_the_reply_missing() -> None:
    work = replace(TALK, limits={"judge": Limits(retries=1)})
    step = play(work, site(helpers={"user": hosted(1.0), "judge": hosted(1.0, fails=0.999)}), 8)
    assert all(reply.missing for reply in step.replies)
    assert step.failed["judge"] == step.calls["judge"] and step.failed["user"] == 0


def test_calls_that_exceed_their_timeout_are_tried_again() -> None:
    clock, rng = Clock(), random.Random(0)
    endpoint = Endpoint(clock, EndpointSite.model_validate(hosted(9.0)), Limits(timeout_s=2.0, retries=2, backoff_s=1))
    clock.start(endpoint.call(rng))
    clock.run()
    assert endpoint.attempts == 3 and endpoint.failed == 1
    assert 6 + 3 * 0.5 <= clock.now <= 6 + 3 * 1.5  # three attempts, pauses of about 1 and 2 s


def test_lost_gpus_cost_the_work_since_the_checkpoint() -> None:
    calm, rough = site(), site(failures={"gpu_hours": 1.0, "restart_s": 100.0})
    assert play(TALK, calm, 8).lost == 0
    lost = [play(replace(TALK, save_every=5), rough, 512, seed).lost for seed in range(20)]
    assert max(lost) > 100 and min(lost) >= 0


# --- recipes and fleets -----------------------------------------------------------------------------------------------


def test_the_published_collabllm_step_makes_768_simulator_and_768_judge_calls() -> None:
    words = [
        "models.judge={model: openai/gpt-4o-mini, temperature: 0}"
    ]  # different settings from the user's: its own limits
    work = work_of(load_recipe("collabllm-verl-grpo", words).recipe)
    assert (work.prompts, work.group, work.samples, work.rounds) == (16, 8, 3, 2)
    assert work.calls() == {POLICY: 128 + 768, "user": 768, "judge": 768}
    assert work.limits["user"] == Limits(concurrency=64)


def test_helpers_of_one_spec_share_one_endpoint() -> None:
    work = work_of(load_recipe("collabllm-grpo").recipe)
    assert work.judges == (("user",), ("user",)) and set(work.limits) == {"user"}


def test_an_extraction_is_a_call_before_the_metric() -> None:
    words = ["reward.metrics=[document->bleu, interactivity, {name: answer->accuracy, extract: last}]"]
    work = work_of(load_recipe("collabllm-grpo", [*words, "models.judge=policy"]).recipe)
    assert work.judges == ((POLICY,), (POLICY,), (POLICY,))


def test_classmates_are_called_once_per_reply() -> None:
    work = work_of(load_recipe("classmate-gsm8k").recipe)
    assert work.calls() == {POLICY: 128, "peer": 128} and work.samples == 4


def test_a_thought_that_is_cut_is_handed_on_at_every_cut() -> None:
    work = work_of(load_recipe("classmate-gsm8k", ["futures.reward=steps", "futures.cuts=3"]).recipe)
    assert work.calls()["peer"] == 3 * 128


def test_turns_and_their_futures_are_counted() -> None:
    work = work_of(load_recipe("gsm8k-multiturn").recipe)
    assert work.calls() == {POLICY: 128 * 3} and not work.every_turn


def test_a_recipe_without_rollouts_is_refused() -> None:
    with pytest.raises(UserError, match="plays no rollouts"):
        work_of(load_recipe("collabllm-sft").recipe)


def test_the_fleet_is_the_smallest_that_does_not_delay_the_step() -> None:
    work = replace(TALK, prompts=32, limits={"user": Limits(8), "judge": Limits(8)})
    somewhere = site(learn={"fixed_s": 0, "sync_s": 0})
    fleet = needed(work, somewhere, 8, slack=0.1)
    ample = play(work, Fleet({"user": 99, "judge": 99}, 64).at(somewhere), 8).seconds
    user = fleet.replicas["user"]
    alone = [play(work, Fleet({"user": n, "judge": 99}, 64).at(somewhere), 8).seconds for n in (user - 1, user)]
    assert alone[0] > 1.1 * ample and alone[1] <= 1.15 * ample
    assert play(work, fleet.at(somewhere), 8).seconds < 1.35 * ample


@given(st.integers(1, 500), st.integers(1, 500))
def test_the_smallest_sufficient_number_is_found(wanted: int, most: int) -> None:
    assert smallest(lambda n: n >= wanted, max(wanted, most)) == wanted


@given(st.integers(1, 4000), st.integers(1, 1024))
def test_the_step_is_a_multiple_of_its_parts(prompts: int, gpus: int) -> None:
    part, own, times = part_of(replace(TALK, prompts=prompts), gpus)
    assert part.prompts * times == prompts and own * times == gpus


def test_the_command_prints_a_line_for_each_number_of_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["collabllm-verl-grpo", "train.prompts_per_step=2", "--gpus", "8", "16", "--steps", "2"]
    assert main([*words, "--set", "helpers.user.latency_s=1.5"]) == 0
    out = capsys.readouterr().out
    assert "GPUs" in out and out.count("\n      8") + out.count("\n 8") + out.count("\n   8") >= 1
    assert "policy 112, user 192" in out and "policy 224, user 384" in out


def test_a_wrong_key_of_the_site_is_named() -> None:
    with pytest.raises(UserError, match="unknown key 'cuont' in workers; did you mean 'count'"):
        site_of(None, ["workers.cuont=3"])
    assert site_of(None, ["policy.reply_tokens=70"]).policy.reply_tokens == Length(median=70)
