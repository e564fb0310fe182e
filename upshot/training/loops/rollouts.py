"""The replies of each step, in order: played when they are needed, or some steps ahead while earlier ones are learned.

Playing n steps ahead, step k is sampled entirely by the weights that step k − n began with; the first n steps use the
initial weights. n copies of the trained weights take turns, and a copy is renewed only between two steps that it plays.
Helpers that are copies of the policy follow the same schedule (snapshots.py). So what is sampled depends on the seed,
not on timing. A checkpoint that holds the copies is enough for an exact resume: unfinished steps are played again.
"""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeVar

from upshot.core.event_loop import Stopwatch
from upshot.models.base import PolicySampler
from upshot.rollout.reply import Rollout
from upshot.training.metrics.throughput import count_sampled
from upshot.training.snapshots import PLAYING

T = TypeVar("T")
Groups = list[list[Rollout]]
TimedGroups = tuple[Groups, dict[str, float]]
"""A step's replies, grouped by row, and how long it took to play them."""


@dataclass
class RolloutSchedule:
    """Plays the steps of a phase."""

    play: Callable[[int], Coroutine[Any, Any, Groups]]
    sampler: PolicySampler
    ahead: int
    """How many steps ahead of the learner replies are played; 0: each step is played when it is needed."""
    steps: range
    _under_way: dict[int, asyncio.Task[TimedGroups]] = field(default_factory=dict)

    async def __aenter__(self) -> RolloutSchedule:
        self.sampler.resume_at(self.steps.start)
        for step in range(self.steps.start, self.steps.start + self.ahead):
            # At the start all copies hold the initial weights; after a resume, those that the checkpoint kept.
            self.sampler.ahead[step % self.ahead].engine.version = max(step - self.ahead, 0)
            self._begin(step)
        return self

    async def __aexit__(self, *exc: object) -> None:
        for task in self._under_way.values():
            task.cancel()
        await asyncio.gather(*self._under_way.values(), return_exceptions=True)

    async def get(self, step: int) -> TimedGroups:
        """The replies of a step."""
        if self.ahead:
            return await self._under_way.pop(step)
        self.sampler.renew(step)
        return await self._play(step)

    def start_next(self, step: int) -> None:
        """Before step `step` is learned: start playing a later step with the weights as they are now."""
        if self.ahead:
            self.sampler.renew(step)
            # This copy has just played `step` and plays next what comes `ahead` steps later: it is free until then, so
            # its weights can be replaced while the other copies are still sampling.
            self.sampler.ahead[step % self.ahead].catch_up(step)
            self._begin(step + self.ahead)

    async def _play(self, step: int) -> TimedGroups:
        """Play a step, and measure where the time went."""
        started = time.perf_counter()
        with Stopwatch().running() as watch:
            groups = await self.play(step)
        took = time.perf_counter() - started
        times = {f"time/{name}": watch.seconds[name] for name in ("sample", "futures", "judges") if watch.seconds[name]}
        tokens = count_sampled(chain.from_iterable(groups))
        return groups, times | {"time/rollout": took, "time/sampled_per_s": tokens / max(took, 1e-9)}

    def _begin(self, step: int) -> None:
        if step in self.steps:
            # Whoever samples in this task, however deep below it, finds the step and by it the copy that plays it.
            context = contextvars.copy_context()
            context.run(PLAYING.set, step)
            self._under_way[step] = asyncio.get_running_loop().create_task(self._play(step), context=context)


def staleness(groups: Sequence[Sequence[Rollout]], step: int) -> dict[str, float]:
    """How many steps old the weights were that sampled a step's tokens: mean and maximum."""
    samples = [sample for group in groups for reply in group for sample in reply.samples() if sample.ids]
    tokens = sum(len(sample.ids) for sample in samples)
    if not tokens:
        return {}
    behind = sum((step - sample.version) * len(sample.ids) for sample in samples)
    most = max(step - sample.version for sample in samples)
    return {"policy/staleness": behind / tokens, "policy/staleness_max": float(most)}


async def in_thread(work: Callable[[], T]) -> T:
    """Run work in a thread and return its result. A cancellation is delivered only after the work has ended.

    A thread cannot be stopped. If the cancellation arrived at once, the run would save weights while they change.
    """
    task = asyncio.current_task()
    assert task is not None
    future = asyncio.get_running_loop().run_in_executor(None, work)
    cancelled = 0
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            cancelled += 1
            task.uncancel()
    if cancelled:
        task.cancel()
    return future.result()
