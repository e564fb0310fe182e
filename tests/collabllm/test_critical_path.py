"""On a virtual clock, a step takes about as long as its longest chain of calls; benchmarks measure the same on a real
one."""

from __future__ import annotations

import pytest

from tests.collabllm.stage import actor, rows, run_virtual, scene
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
    groups, seconds = run_virtual(step(model))
    stats = model.stats()
    calls = sum(stats[f"{role}/calls"] for role in ("policy", "future", "user", "judge"))
    assert calls == 128 + 384 * (2 + 2 + 2)
    assert seconds <= 2.5 * PATH, f"{seconds:.2f} s, critical path {PATH:.2f} s"
    assert all(reply.reward.total.value is not None for group in groups for reply in group)


def test_without_limits_a_step_takes_exactly_the_critical_path() -> None:
    _, seconds = run_virtual(step(actor(LATENCY, concurrency=4096)))
    assert seconds == pytest.approx(PATH, abs=0.001)
