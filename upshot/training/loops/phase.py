"""The frame of every method, step by step: play (where it plays), evaluate, learn, write down; at the end, save.

A step's line has the evaluation of the weights before the step's update, so evaluation comes before learning: nothing
is awaited between an optimizer step and its line in the run folder, and Ctrl-C finds a consistent run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from upshot.config.phases import WARM_START
from upshot.config.recipe import EvalConfig, TrainConfig
from upshot.rollout.rollout import Rollout
from upshot.training.learner.learner import Learner
from upshot.training.loops.base import Logs, LoopRun
from upshot.training.metrics.best import BestTracker, best_metric, is_evaluation
from upshot.training.metrics.throughput import ThroughputMeter

Evaluate = Callable[[], Awaitable[Logs]]
"""What evaluates the model as it is now."""


@dataclass
class Step:
    """A step under way; whoever learns puts what is to be logged into `logs`."""

    number: int
    """Steps before it."""
    phase: TrainingPhase
    times: Logs
    """Where its time goes."""
    groups: Sequence[Sequence[Rollout]] = ()
    """The replies that it learns from, where the method plays."""
    evaluation: Logs = field(default_factory=dict)
    logs: Logs = field(default_factory=dict)

    @contextmanager
    def learning(self) -> Iterator[None]:
        """Inside, the weights change: on all ranks together, and timed."""
        with self.phase.run.ranks.update(), self.phase.meter.learning(self.phase.learner, self.times):
            yield


class TrainingPhase:
    """A phase of a run: one method, one learner, so many steps; evaluated on the way, which may end it early."""

    learner: Learner
    meter: ThroughputMeter

    def __init__(self, run: LoopRun, config: TrainConfig, examples: int) -> None:
        self.run = run
        self.config = config.resolve_steps(examples)
        """With its epochs counted in steps."""
        self.eval = run.recipe.eval if run.phase != WARM_START else EvalConfig()
        self.tracker = BestTracker.from_lines(run.recipe, run.lines())
        if config.epochs is not None:
            run.say(f"{config.epochs:g} epochs of {examples} examples: {self.config.steps} steps")

    @property
    def stopped(self) -> bool:
        """Whether too many evaluations have passed without a new best."""
        return bool(self.eval.stop_after) and self.tracker.since_best() >= self.eval.stop_after

    @property
    def last_is_due(self) -> bool:
        """Whether the recipe evaluates and the run's last step has no line of nothing but its evaluation yet."""
        return bool(self.eval.every) and not any(map(is_evaluation, self.run.lines(self.run.step)))

    @property
    def over(self) -> bool:
        """Whether a finished run was resumed, with nothing left to do."""
        at_end = self.run.step > 0 and self.run.step >= self.config.steps
        return self.stopped or (at_end and not self.last_is_due)

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
                if self.eval.every and number % self.eval.every == 0:
                    step.evaluation = await self._evaluate(number, evaluate)
                if self.stopped:
                    self.run.write_evaluation(step.evaluation)
                    self.run.say(
                        f"eval.stop_after: {self.tracker.since_best()} evaluations without a new best of "
                        f"{self.tracker.metric}; training ends after step {self.run.step}"
                    )
                    return
                yield step
            self.run.step_done(number + 1, step.logs | times, step.groups)
            await asyncio.sleep(0)  # where Ctrl-C arrives: between steps, never inside one

    async def finish(self, evaluate: Evaluate) -> None:
        """Save the finished model and evaluate it, as a line of its own; when interrupted, when the run goes on."""
        self.run.checkpoint()
        if self.run.ranks.broadcast_object("last look", self.last_is_due):
            self.run.write_evaluation(await self._evaluate(self.run.step, evaluate))
            if lost := self.tracker.describe_loss():
                kept = "`upshot export` takes that checkpoint" if best_metric(self.run.recipe) else "it was not kept"
                self.run.say(f"{lost}: {kept}")

    async def _evaluate(self, step: int, evaluate: Evaluate) -> Logs:
        """Metrics under `eval/` of the model after so many steps; the best one so far is saved."""
        started = time.perf_counter()
        logs = {f"eval/{key}": value for key, value in (await evaluate()).items()}
        self.tracker.check_known(logs)
        best = self.tracker.add(step, logs)
        if best is not None and best_metric(self.run.recipe):
            self.run.checkpoint(best)
        return logs | {"time/eval": time.perf_counter() - started}
