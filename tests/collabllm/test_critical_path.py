"""A step takes about as long as its longest chain of calls."""

from __future__ import annotations

import asyncio
import os
import time

import pytest

from tests.collabllm.stage import actor, rows, run_virtual, scene
from tests.patience import patience
from upshot.rollout.play import play_step

LATENCY = 0.05
PATH = 6 * LATENCY
"""One reply, two rounds of a user and a policy call, one judge."""


def step(model):
    """16 prompts x 8 replies x 3 futures x 2 user turns, 2 judged metrics."""

    async def play():
        return await play_step(scene(model, samples=3, rounds=2), rows(16), 8, seed=0)

    return play


def test_a_grpo_step_takes_at_most_two_and_a_half_critical_paths() -> None:
    model = actor(LATENCY, concurrency=512)
    cpu = time.process_time()
    groups, seconds = run_virtual(step(model))
    cpu = time.process_time() - cpu
    stats = model.stats()
    calls = sum(stats[f"{role}/calls"] for role in ("policy", "future", "user", "judge"))
    assert calls == 128 + 384 * (2 + 2 + 2)
    assert seconds <= 2.5 * PATH, f"{seconds:.2f} s, critical path {PATH:.2f} s"
    assert cpu / calls < patience(0.003), f"{cpu / calls * 1000:.2f} ms of CPU a call"
    assert all(reply.reward.total.value is not None for group in groups for reply in group)


def test_without_a_limit_in_the_way_it_is_the_critical_path_itself() -> None:
    _, seconds = run_virtual(step(actor(LATENCY, concurrency=4096)))
    assert seconds == pytest.approx(PATH, abs=0.001)


@pytest.mark.slow
def test_the_same_by_the_clock_on_the_wall() -> None:
    if os.getloadavg()[0] > 1:
        pytest.skip(f"the machine is busy (load {os.getloadavg()[0]:.1f}): wall time would say nothing")

    async def timed() -> float:
        model = actor(LATENCY, concurrency=512)
        await step(model)()
        began = time.perf_counter()
        await step(model)()
        return time.perf_counter() - began

    best = min(asyncio.run(timed()) for _ in range(5))
    assert best <= 2.5 * PATH, f"{best:.2f} s, critical path {PATH:.2f} s"
