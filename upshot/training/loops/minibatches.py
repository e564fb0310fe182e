"""A step's items, and the updates on what they teach: minibatches with an optimizer step on each, logged as one.

What is logged are means over all minibatches, weighed by the number of data in each, the number of skipped updates, and
the drift of the first minibatch (later ones have other weights than the sampler had).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
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
    """Training data; those of a unit stay together in a minibatch."""
    objective: Callable[[], Objective]
    """The loss, made anew for each minibatch."""
    logs: Logs = field(default_factory=dict)
    """What there is to log before anything is learned."""
    counts: Logs = field(default_factory=dict)
    """How many sequences, pairs and tokens it has."""


def update(learner: Learner, lesson: Lesson, seed: int) -> Logs:
    """Loss, gradient and an optimizer step for each minibatch of a lesson; what to log."""
    means: list[tuple[Logs, Objective]] = []
    steps: list[Logs] = []
    drift = logged_drift(lesson.logs)
    for units in minibatches(lesson.units, learner.config.minibatches, seed):
        objective = lesson.objective()
        means.append((learner.forward_backward(units, objective), objective))
        drift = drift or objective.drift(learner.ranks)
        steps.append(learner.step())
    return lesson.logs | join_means(means) | join_steps(steps) | drift | lesson.counts


def minibatches(units: Sequence[T], parts: int, seed: int) -> list[list[T]]:
    """The units in this many parts of nearly the same size, shuffled by the seed; fewer where there are fewer units."""
    parts = min(parts, len(units))
    order = pick(len(units), len(units), 0, seed) if parts > 1 else range(len(units))
    ends = [len(units) * part // parts for part in range(parts + 1)] if parts else []
    return [[units[i] for i in order[start:stop]] for start, stop in pairwise(ends)]


def pick(size: int, count: int, step: int, seed: int) -> list[int]:
    """The items of a step: passes over the data in a new order each, position a function of the step alone."""
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


def join_means(parts: Sequence[tuple[Mapping[str, float], Objective]]) -> Logs:
    """The means of several minibatches as those of all their data."""
    if len(parts) == 1:
        return dict(parts[0][0])
    out: Logs = {}
    for name in dict.fromkeys(name for logs, _ in parts for name in logs):
        values = [(logs[name], objective.weight(name)) for logs, objective in parts if name in logs]
        out[name] = _weighted(values)
    return out


def join_steps(steps: Sequence[Mapping[str, float]]) -> Logs:
    """What several optimizer steps came to: how many were skipped, the mean norm of the gradients, the last rate."""
    if not steps:
        return {}
    return {
        **steps[-1],
        "train/grad_norm": _weighted([(step["train/grad_norm"], 1.0) for step in steps]),
        "train/skipped": math.fsum(step["train/skipped"] for step in steps),
    }


def _weighted(values: Sequence[tuple[float, float]]) -> float:
    """The mean of values with their weights; one alone is itself, to the last bit."""
    if len(values) == 1:
        return values[0][0]
    # No fsum: a gradient that is not finite has to show.
    return sum(value * weight for value, weight in values) / sum(weight for _, weight in values)
