"""The items of a step, and learning what they teach: minibatches with an optimizer step each, logged as one.

What is logged are means over all minibatches, weighed by the number of data in each, the number of skipped updates, and
the drift of the first minibatch (later ones have other weights than the sampler had).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import TypeVar

from upshot.core.conversation import derive_seed
from upshot.training.learner.batch import Datum
from upshot.training.learner.learner import Learner
from upshot.training.loops.base import Logs
from upshot.training.objectives.mismatch import logged_drift
from upshot.training.objectives.objectives import Objective

T = TypeVar("T")


@dataclass
class Lesson:
    """What is learned in a step."""

    units: Sequence[Sequence[Datum]]
    """Training data; the sequences of a unit stay in one minibatch."""
    objective: Callable[[], Objective]
    """The loss, made anew for each minibatch."""
    logs: Logs = field(default_factory=dict)
    """What to log, measured before the update."""
    counts: Logs = field(default_factory=dict)
    """What to log: how many sequences, pairs and tokens it has."""


def learn(learner: Learner, items: Sequence[T], seed: int, prepare: Callable[[Learner, Sequence[T]], Lesson]) -> Logs:
    """Learn what a step's replies or examples teach: loss, gradient and an optimizer step for each minibatch; what to
    log. `seed`: for the order of minibatches."""
    lesson = prepare(learner, items)
    learned: list[tuple[Logs, Objective]] = []
    drift = logged_drift(lesson.logs)
    for units in minibatches(lesson.units, learner.config.minibatches, seed):
        objective = lesson.objective()
        logs = learner.forward_backward(units, objective)
        drift = drift or objective.drift(learner.ranks)
        learned.append((logs | learner.step(), objective))
    return lesson.logs | join_logs(learned) | drift | lesson.counts


def minibatches(units: Sequence[T], parts: int, seed: int) -> list[list[T]]:
    """The units in this many parts of nearly the same size, shuffled by the seed; fewer where there are fewer units."""
    parts = min(parts, len(units))
    order = pick(len(units), len(units), 0, seed) if parts > 1 else range(len(units))
    ends = [len(units) * part // parts for part in range(parts + 1)] if parts else []
    return [[units[i] for i in order[start:stop]] for start, stop in pairwise(ends)]


def pick(size: int, count: int, step: int, seed: int) -> list[int]:
    """The items of a step. Each pass over the data has a new order; the step number alone gives the position."""
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


def join_logs(learned: Sequence[tuple[Logs, Objective]]) -> Logs:
    """What is logged of several minibatches: means over all their data, the last learning rate, all skipped updates."""
    joined: Logs = {}
    for name in dict.fromkeys(name for logs, _ in learned for name in logs):
        values = [logs[name] for logs, _ in learned if name in logs]
        if name == "train/skipped":
            joined[name] = math.fsum(values)
        elif name == "train/lr" or len(values) == 1:  # one alone is itself, to the last bit
            joined[name] = values[-1]
        else:
            weights = [1.0 if name == "train/grad_norm" else by.weight(name) for logs, by in learned if name in logs]
            # No fsum: a gradient that is not finite has to show.
            joined[name] = sum(v * weight for v, weight in zip(values, weights, strict=True)) / sum(weights)
    return joined
