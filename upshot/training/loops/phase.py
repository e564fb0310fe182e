"""What the loops of all methods share: making the learner, timing and writing steps, evaluating, ending.

Evaluation comes before learning: a step's line holds the evaluation of the weights before its update. So nothing is
awaited between an optimizer step and its line in the run folder, and Ctrl-C always finds a consistent run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from upshot.config.method import TrainingMethod, method_of
from upshot.config.phases import WARM_START
from upshot.config.recipe import EvalConfig, TrainConfig
from upshot.core.conversation import derive_seed
from upshot.core.errors import UserError
from upshot.models.rendering import Renderer
from upshot.training.learner.learner import Learner
from upshot.training.loops.base import Logs, LoopRun
from upshot.training.loops.minibatches import Lesson, learn, pick
from upshot.training.metrics.best import BestTracker, best_metric, is_evaluated, is_evaluation
from upshot.training.metrics.throughput import ThroughputMeter

T = TypeVar("T")
Evaluate = Callable[[], Awaitable[Logs]]
"""What evaluates the model as it is now."""


class TrainingPhase:
    """A phase of a run: one method, one learner, a number of steps. Evaluations may end it early."""

    learner: Learner
    meter: ThroughputMeter

    def __init__(self, run: LoopRun, config: TrainConfig, examples: int) -> None:
        self.run = run
        self.config = config.resolve_steps(examples)
        """With epochs converted to steps."""
        self.eval = run.recipe.eval if run.phase != WARM_START else EvalConfig()
        self.tracker = BestTracker.from_lines(run.recipe, run.lines())
        if config.epochs is not None:
            run.say(f"{config.epochs:g} epochs of {examples} examples: {self.config.steps} steps")

    @property
    def stopped(self) -> bool:
        """Whether `eval.stop_after` evaluations have passed without a new best."""
        return bool(self.eval.stop_after) and self.tracker.since_best() >= self.eval.stop_after

    @property
    def last_is_due(self) -> bool:
        """Whether the recipe evaluates, and the evaluation after the last step has not been written yet."""
        return bool(self.eval.every) and not any(map(is_evaluation, self.run.lines(self.run.step)))

    @property
    def over(self) -> bool:
        """Whether nothing is left to do: a finished run was resumed."""
        at_end = self.run.step > 0 and self.run.step >= self.config.steps
        return self.stopped or (at_end and not self.last_is_due)

    @property
    def left(self) -> range:
        """The steps that are left."""
        return range(self.run.step, self.config.steps)

    def begin(self) -> Learner:
        """Make the learner, or restore it when the phase is resumed, with the reference that the phase began with."""
        run, method = self.run, method_of(self.config.method)
        self.learner = run.policy.learner(self.config, method.value_head)
        if run.resumed_from is not None:
            self.learner.load(run.resumed_from)
        if method.needs_reference(self.config):
            run.policy.keep_reference(self.learner, run.phase, begun=run.step > 0)
        self.meter = ThroughputMeter(run.policy.module, run.ranks.size)
        run.begin(self.learner, self.config)
        return self.learner

    @contextmanager
    def learning(self, logs: Logs) -> Iterator[None]:
        """Inside, all ranks change the weights together; afterwards `logs` says how fast."""
        before, started = self.learner.read, time.perf_counter()
        with self.run.ranks.update():
            yield
        logs |= self.meter.learned(self.learner.read - before, time.perf_counter() - started)

    def write_stop(self, logs: Logs) -> None:
        """Write the evaluation that `stopped` the training, and say why it ends."""
        self.run.write_evaluation({key: value for key, value in logs.items() if is_evaluated(key)})
        self.run.say(
            f"eval.stop_after: {self.tracker.since_best()} evaluations without a new best of "
            f"{self.tracker.metric}; training ends after step {self.run.step}"
        )

    async def finish(self, evaluate: Evaluate) -> None:
        """Save the finished model and evaluate it, in a separate line; a resumed run makes up for it if interrupted."""
        self.run.checkpoint()
        if self.run.ranks.broadcast_object("last look", self.last_is_due):
            self.run.write_evaluation(await self.evaluate(self.run.step, evaluate))
            if lost := self.tracker.describe_loss():
                kept = "`upshot export` takes that checkpoint" if best_metric(self.run.recipe) else "it was not kept"
                self.run.say(f"{lost}: {kept}")

    async def evaluate_if_due(self, step: int, evaluate: Evaluate) -> Logs:
        """What the recipe's evaluation of the model after `step` steps logs; nothing where none is due."""
        due = bool(self.eval.every) and step % self.eval.every == 0
        return await self.evaluate(step, evaluate) if due else {}

    async def evaluate(self, step: int, evaluate: Evaluate) -> Logs:
        """Evaluate the model after `step` steps and return metrics under `eval/`; save it if it is the best so far."""
        started = time.perf_counter()
        logs = {f"eval/{key}": value for key, value in (await evaluate()).items()}
        self.tracker.check_known(logs)
        best = self.tracker.add(step, logs)
        if best is not None and best_metric(self.run.recipe):
            self.run.checkpoint(best)
        return logs | {"time/eval": time.perf_counter() - started}


def load_examples(
    run: LoopRun, config: TrainConfig, method: TrainingMethod, render: Callable[[Sequence[Any], Renderer, int], list[T]]
) -> list[T]:
    """The method's examples as training data; those longer than the context are left out."""
    examples = method.examples(config, run.task)
    fitting = render(examples, run.policy.renderer, run.policy.max_context)
    if len(fitting) < len(examples):
        run.say(f"{len(examples) - len(fitting)} of {len(examples)} {method.held_out} are longer than the context")
    if not fitting:
        raise UserError(method.explain_empty(config, run.task))
    return fitting


async def learn_examples(
    run: LoopRun,
    config: TrainConfig,
    examples: Sequence[T],
    prepare: Callable[[Learner, Sequence[T]], Lesson],
    measure: Callable[[Learner], Logs],
) -> None:
    """The loop of the methods that learn from a fixed set of examples: each step picks some of them and learns.

    prepare: makes a lesson of the picked examples. measure: evaluates the model on held-out ones.
    """
    phase = TrainingPhase(run, config, len(examples))
    if phase.stopped:
        return
    learner = phase.begin()
    seed = derive_seed(run.recipe.seed, run.phase)

    async def evaluate() -> Logs:
        return measure(learner)

    for number in phase.left:
        started, logs = time.perf_counter(), dict[str, float]()
        logs |= await phase.evaluate_if_due(number, evaluate)
        if phase.stopped:
            phase.write_stop(logs)
            break
        picked = [examples[i] for i in pick(len(examples), config.prompts_per_step, number, seed)]
        with phase.learning(logs):
            logs |= learn(learner, picked, derive_seed(seed, "minibatches", number), prepare)
        run.step_done(number + 1, logs | phase.meter.step_times(started))
        await asyncio.sleep(0)  # where Ctrl-C arrives: between steps, never inside one
    await phase.finish(evaluate)
