"""What the loops of all methods share: making the learner, evaluating, learning and timing steps, ending.

Evaluation comes before learning: a step's line in metrics.jsonl holds the evaluation of the weights before its update.
So nothing is awaited between an optimizer step and its line, and Ctrl-C always finds a consistent run.

A step learns a `Lesson` in minibatches with an optimizer step each, logged as one: means over all minibatches, weighted
by the number of data in each, sums of counts (sequences, tokens, skipped updates), and the drift of the first minibatch
(later ones have other weights than the sampler had). How fast it was on this machine is logged under `time/`.
"""

from __future__ import annotations

import asyncio
import math
import random
import resource
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any, TypeVar

import torch

from upshot.config.method import TrainingMethod, method_of
from upshot.config.phases import WARM_START
from upshot.config.recipe import EvalConfig, TrainConfig
from upshot.core.conversation import derive_seed
from upshot.core.errors import UserError
from upshot.models.rendering import Renderer
from upshot.training.learner.batch import Datum
from upshot.training.learner.learner import SEQUENCES, TOKENS, Learner
from upshot.training.loops.base import Logs, LoopRun
from upshot.training.metrics.best import BestTracker, best_metric, is_evaluated, is_evaluation
from upshot.training.objectives.objectives import MEAN, Objective

T = TypeVar("T")
Render = Callable[[Sequence[Any], Renderer, int], Sequence[T]]
"""Makes training data of examples, of those that fit a context of so many tokens (0: any)."""
Evaluate = Callable[[], Awaitable[Logs]]
"""What evaluates the model as it is now."""
PEAK = {"B200": 2250, "H200": 989, "H100": 989, "A100": 312, "L40S": 362, "A10G": 70, "4090": 165, "3090": 71}
"""TFLOP/s of dense bfloat16, by a part of the device's name."""

SUMMED = (SEQUENCES, TOKENS, "train/skipped")
"""What is logged as a sum over minibatches."""


class ThroughputMeter:
    """Measures the learner of a model."""

    def __init__(self, module: Any, devices: int = 1) -> None:
        self.device = module.device
        embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
        tied = head is not None and head.weight is embedding.weight
        multiplied = [p for p in module.parameters() if p.ndim >= 2 and (tied or p is not embedding.weight)]
        # 2 per weight and token forward, 2 for the gradient of its input, 2 for its own gradient if it is trained.
        self.flops = sum((6 if p.requires_grad else 4) * p.numel() for p in multiplied)
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else ""
        tera = next((tera for part, tera in PEAK.items() if part in name), 0)
        self.peak = devices * tera * 1e12 if module.dtype in (torch.bfloat16, torch.float16) else 0.0

    def measure(self, step: float, learn: float, tokens: int) -> dict[str, float]:
        """The metrics of a step that took `step` seconds, `learn` of them to learn so many `tokens`.

        Speed, the share of the GPU's peak (if known), and the peak of memory: on a GPU since the last step, on the CPU
        that of the process so far.
        """
        times = {"time/learn": learn, "time/step": step}
        if tokens and learn > 0:
            times["time/learned_per_s"] = tokens / learn
            if self.peak:
                times["time/mfu"] = tokens * self.flops / learn / self.peak
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            unit = 1 if sys.platform == "darwin" else 1024
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        return times | {"time/memory_gib": peak / 2**30}


@dataclass
class Lesson:
    """What is learned in a step."""

    units: Sequence[Sequence[Datum]]
    """Training data; the sequences of a unit stay in one minibatch."""
    objective: Callable[[], Objective]
    """The loss, made anew for each minibatch."""
    logs: Logs = field(default_factory=dict)
    """What to log, measured before the update."""


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
            run.say(f"{config.epochs:g} epochs of {examples} examples: {self.config.steps} whole steps")

    @property
    def stopped(self) -> bool:
        """Whether `eval.stop_after` evaluations have passed without a new best."""
        return bool(self.eval.stop_after) and self.tracker.since_best() >= self.eval.stop_after

    @property
    def final_evaluation_is_due(self) -> bool:
        """Whether the recipe evaluates, and the evaluation after the last step has not been written yet."""
        return bool(self.eval.every) and not any(map(is_evaluation, self.run.lines(self.run.step)))

    @property
    def is_finished(self) -> bool:
        """Whether nothing is left to do: a finished run was resumed."""
        at_end = self.run.step > 0 and self.run.step >= self.config.steps
        return self.stopped or (at_end and not self.final_evaluation_is_due)

    @property
    def remaining_steps(self) -> range:
        """The numbers of the steps still to do."""
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
    def learning(self, started: float, logs: Logs) -> Iterator[None]:
        """Inside, all ranks change the weights together; on exit `logs` gets the times since `started`."""
        before, begun = self.learner.read, time.perf_counter()
        with self.run.ranks.update():
            yield
        now = time.perf_counter()
        logs |= self.meter.measure(now - started, now - begun, self.learner.read - before)

    def write_stop(self, logs: Logs) -> None:
        """Write the evaluation after which training stops, and say why it ends."""
        self.run.write_evaluation({key: value for key, value in logs.items() if is_evaluated(key)})
        self.run.say(
            f"eval.stop_after: {self.tracker.since_best()} evaluations without a new best of "
            f"{self.tracker.metric}; training ends after step {self.run.step}"
        )

    async def finish(self, evaluate: Evaluate) -> None:
        """Save the finished model and evaluate it, in a separate line; if interrupted, a resumed run does it again."""
        self.run.checkpoint()
        if self.run.ranks.broadcast_object("final evaluation", self.final_evaluation_is_due):
            self.run.write_evaluation(await self.evaluate(self.run.step, evaluate))
            if lost := self.tracker.describe_loss():
                kept = (
                    "`upshot export` writes the best checkpoint"
                    if best_metric(self.run.recipe)
                    else "the best was not kept"
                )
                self.run.say(f"{lost}: {kept}")

    def evaluates(self, step: int) -> bool:
        """Whether the recipe evaluates the model after `step` steps."""
        return bool(self.eval.every) and step % self.eval.every == 0

    async def evaluate(self, step: int, evaluate: Evaluate) -> Logs:
        """Evaluate the model after `step` steps and return metrics under `eval/`; save it if it is the best so far."""
        started = time.perf_counter()
        logs = {f"eval/{key}": value for key, value in (await evaluate()).items()}
        self.tracker.check_known(logs)
        best = self.tracker.add(step, logs)
        if best is not None and best_metric(self.run.recipe):
            self.run.checkpoint(best)
        return logs | {"time/eval": time.perf_counter() - started}


def learn(learner: Learner, items: Sequence[T], seed: int, prepare: Callable[[Learner, Sequence[T]], Lesson]) -> Logs:
    """Learn from a step's replies or examples: loss, gradient and an optimizer step for each minibatch.

    Returns what to log: means over all data, the last learning rate, sums of counts. seed: of the minibatches' order.
    """
    lesson = prepare(learner, items)
    learned: dict[str, list[tuple[float, Objective]]] = {}
    drift: Logs = {}
    parts = minibatches(lesson.units, learner.config.minibatches, seed)
    for units in parts:
        objective = lesson.objective()
        logs = learner.forward_backward(units, objective)
        if MEAN not in lesson.logs:
            drift = drift or objective.drift(learner.ranks)
        for name, value in (logs | learner.step()).items():
            learned.setdefault(name, []).append((value, objective))
    learner.steps += learner.config.minibatches - len(parts)
    joined: Logs = {} if lesson.units else {SEQUENCES: 0.0, TOKENS: 0.0}
    for name, by_minibatch in learned.items():
        values = [value for value, _ in by_minibatch]
        if name in SUMMED:
            joined[name] = math.fsum(values)
        elif name == "train/lr" or len(values) == 1:  # a single value stays as it is, bit for bit
            joined[name] = values[-1]
        else:
            weights = [1.0 if name == "train/grad_norm" else by.weight(name) for _, by in by_minibatch]
            # Not fsum, which raises on some infinite values: they must show up in the log.
            joined[name] = sum(v * weight for v, weight in zip(values, weights, strict=True)) / sum(weights)
    return lesson.logs | joined | drift


def minibatches(units: Sequence[T], parts: int, seed: int) -> list[list[T]]:
    """The shuffled units in `parts` lists of nearly the same size; fewer lists if there are fewer units."""
    parts = min(parts, len(units))
    order = pick(len(units), len(units), 0, seed) if parts > 1 else range(len(units))
    ends = [len(units) * part // parts for part in range(parts + 1)] if parts else []
    return [[units[i] for i in order[start:stop]] for start, stop in pairwise(ends)]


def pick(size: int, count: int, step: int, seed: int) -> list[int]:
    """The indices of a step's items. Every pass over the data has a new order; the step number gives the position."""
    chosen = []
    for place in range(step * count, (step + 1) * count):
        epoch, position = divmod(place, size)
        chosen.append(_order(size, derive_seed(seed, "epoch", epoch))[position])
    return chosen


@lru_cache(maxsize=8)
def _order(size: int, seed: int) -> list[int]:
    order = list(range(size))
    random.Random(seed).shuffle(order)
    return order


def fit_examples(run: LoopRun, examples: Sequence[Any], render: Render[T], what: str, empty: str) -> Sequence[T]:
    """Examples as data of the learner; those that do not fit the context are left out. `empty`: to say if none does."""
    fitting = render(examples, run.policy.renderer, run.policy.max_context)
    if lost := len(examples) - len(fitting):
        run.say(f"{lost} of {len(examples)} {what} examples are left out: too long for the context")
    if not fitting:
        raise UserError(empty)
    return fitting


async def learn_examples(
    run: LoopRun,
    config: TrainConfig,
    method: TrainingMethod,
    render: Render[T],
    prepare: Callable[[Learner, Sequence[T]], Lesson],
    measure: Callable[[Learner, Sequence[T]], Logs],
) -> None:
    """The loop of the methods that learn from a fixed set of examples: each step picks some of them and learns.

    prepare: makes a lesson of the picked examples. measure: evaluates the model on held-out ones.
    """
    found, empty = method.examples(config, run.task), method.explain_empty(config, run.task)
    examples = fit_examples(run, found, render, "training", empty)
    phase, held_out = TrainingPhase(run, config, len(examples)), list[T]()
    if phase.stopped:
        return
    if phase.eval.every:
        found = method.held_out_examples(run.recipe, run.task) or ()
        held_out = list(fit_examples(run, found, render, "held-out", method.explain_empty_evaluation(run.recipe)))
    learner = phase.begin()
    seed = derive_seed(run.recipe.seed, run.phase)

    async def evaluate() -> Logs:
        return measure(learner, held_out)

    for step in phase.remaining_steps:
        started, logs = time.perf_counter(), dict[str, float]()
        if phase.evaluates(step):
            logs |= await phase.evaluate(step, evaluate)
            if phase.stopped:
                phase.write_stop(logs)
                break
        picked = [examples[i] for i in pick(len(examples), config.prompts_per_step, step, seed)]
        with phase.learning(started, logs):
            logs |= learn(learner, picked, derive_seed(seed, "minibatches", step), prepare)
        run.step_done(step + 1, logs)
        await asyncio.sleep(0)  # Ctrl-C takes effect here: between steps, never inside one
    await phase.finish(evaluate)
