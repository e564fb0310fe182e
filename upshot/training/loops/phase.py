"""The frame of every method, step by step: play (where it plays), evaluate, learn, write down; at the end, save.

A step's line has the evaluation of the weights before the step's update, so evaluation comes before learning: nothing
is awaited between an optimizer step and its line in the run folder, and Ctrl-C finds a consistent run.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from upshot.config.recipe import TrainConfig
from upshot.rollout.rollout import Rollout
from upshot.training.learner.learner import Learner
from upshot.training.loops.base import Logs, LoopRun
from upshot.training.loops.evaluate import Evaluate, Evaluator
from upshot.training.metrics.throughput import StepTimes, ThroughputMeter


@dataclass
class Step:
    """A step under way; whoever learns puts what is to be logged into `logs`."""

    number: int
    """Steps before it."""
    phase: TrainingPhase
    times: StepTimes
    groups: Sequence[Sequence[Rollout]] = ()
    """The replies that it learns from, where the method plays."""
    evaluation: Logs = field(default_factory=dict)
    logs: Logs = field(default_factory=dict)

    @contextmanager
    def learning(self) -> Iterator[None]:
        """Inside, the weights change: on all ranks together, and timed."""
        with self.phase.run.ranks.update(), self.times.learning(self.phase.learner):
            yield


class TrainingPhase:
    """A phase of a run: one method, one learner, so many steps."""

    learner: Learner
    meter: ThroughputMeter

    def __init__(self, run: LoopRun, config: TrainConfig, examples: int) -> None:
        self.run = run
        self.config = config.resolve_steps(examples)
        """With its epochs counted in steps."""
        self.evaluator = Evaluator(run)
        if config.epochs is not None:
            run.say(f"{config.epochs:g} epochs of {examples} examples: {self.config.steps} steps")

    @property
    def stopped(self) -> bool:
        """Whether evaluations have ended it early."""
        return self.evaluator.enough

    @property
    def over(self) -> bool:
        """Whether a finished run was resumed, with nothing left to do."""
        at_end = self.run.step > 0 and self.run.step >= self.config.steps
        return self.stopped or (at_end and not self.evaluator.last_is_due)

    def begin(self, reference: bool = False, value_head: bool = False) -> Learner:
        """Make the learner, or restore it where the phase is resumed; with the reference that the phase began with."""
        run = self.run
        self.learner = run.policy.learner(self.config, value_head)
        if run.resumed_from is not None:
            self.learner.load(run.resumed_from)
        if reference:
            run.policy.keep_reference(self.learner, run.phase, begun=run.step > 0)
        self.meter = ThroughputMeter(run.policy.module, run.ranks.size)
        run.begin(self.learner, self.config)
        return self.learner

    async def steps(
        self, evaluate: Evaluate, play: Callable[[Step], Awaitable[None]] | None = None
    ) -> AsyncIterator[Step]:
        """The steps that are left, each ready to be learned from; one that was learned from is written down."""
        for number in range(self.run.step, self.config.steps):
            with self.meter.step() as times:
                step = Step(number, self, times)
                if play is not None:
                    await play(step)
                step.evaluation = await self.evaluator.evaluate_before(number, evaluate)
                if self.stopped:
                    self.evaluator.write_stop(step.evaluation)
                    return
                yield step
            self.run.step_done(number + 1, step.logs | times.logs, step.groups)
            await asyncio.sleep(0)  # where Ctrl-C arrives: between steps, never inside one

    async def finish(self, evaluate: Evaluate) -> None:
        """Save the finished model and evaluate it."""
        self.run.checkpoint()
        await self.evaluator.evaluate_last(evaluate)
