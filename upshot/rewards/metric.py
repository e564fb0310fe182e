"""A metric looks at a finished conversation and returns a score, or missing with the reason.

A plain function is a metric, too: `def polite(conversation): …`, sync or async, which returns a `Score`, a number, a
bool, or None where there is nothing to score. What it takes besides the conversation is as for a metric's constructor.

A plain number is a score, too. Raising is fine: the scorer turns any exception of one conversation into a missing
score with the exception's text in its detail. The rest of the run goes on. `breakpoint()` works: everything runs in one
process.

The metric that every task has, its own verdict, is at the end of this file; each other one has a file in `metrics/`.
"""

from __future__ import annotations

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, cast

from upshot.config.registry import Registry
from upshot.core.conversation import Conversation
from upshot.core.errors import UserError
from upshot.core.event_loop import at_work
from upshot.core.score import Reason, Score
from upshot.core.time_limit import limit_call, limit_call_now
from upshot.rewards.workers.base import Manager
from upshot.tasks.base import Task


class Metric(ABC):
    """Scores conversations. Constructor keyword arguments are its options in the recipe.

    A constructor may also have any of these parameters, which Upshot fills in: `task` (the `Task`), `judge`
    (a `Model`), `tokenizer` (of the policy), `models` (all helper models by name), `sandbox` (a `CodeRunner`).
    """

    intrinsic: bool = False
    """About how it was said (length, interactivity) rather than what was achieved; the log keeps both sums."""
    loads_model: bool = False
    """Whether its first score loads its own model: a dry run skips such a metric."""
    path: str = ""
    """How the recipe names it (tables use another name: `metric_labels`); set when it is built."""

    @abstractmethod
    async def score(self, conversation: Conversation) -> Score:
        """The score of one finished conversation, including its last message."""

    async def aclose(self) -> None:
        """Release what all conversations shared."""


async def score_by(metric: Metric, conversation: Conversation, name: str) -> Score:
    """A metric's score of one conversation: what it returns becomes a `Score`, what it raises is missing."""
    try:
        with at_work("judges"):
            return Score.of(await limit_call(metric, metric.score, conversation), f"metric '{name}'")
    except UserError:
        raise
    except Exception as error:
        return Score.failed(error, name)


async def score_conversation(metrics: Mapping[str, Metric], conversation: Conversation) -> dict[str, Score]:
    """All metrics of one finished conversation, concurrently; one that raises is missing with its reason."""
    scores = await asyncio.gather(*[score_by(metric, conversation, name) for name, metric in metrics.items()])
    return dict(zip(metrics, scores, strict=True))


class FunctionMetric(Metric):
    """A plain function of a conversation as a metric."""

    def __init__(self, function: Callable[..., Any], name: str, options: Mapping[str, Any]) -> None:
        self.function, self.name, self.options = function, name, options

    async def score(self, conversation: Conversation) -> Score:
        """What the function says; None is missing."""
        score: Any = await limit_call(self.function, self.function, conversation, **self.options)
        if score is None:
            return Score.missing(Reason.NOT_SCORED, f"{self.name} returned None")
        return Score.of(score, f"metric '{self.name}'")


class MetricRegistry(Registry[Metric]):
    """Metrics by name; a plain function behind a path is one as it stands."""

    def get(self, name: str, where: str = "") -> Callable[..., Metric]:
        """The class behind a name or path, or what makes a metric of a function."""
        thing: Any = super().get(name, where)
        return _constructor(thing, name) if not isinstance(thing, type) else cast(type[Metric], thing)


def _constructor(function: Callable[..., Any], name: str) -> Callable[..., Metric]:
    """A function as if it were a metric's class: what it takes besides the conversation are the options."""
    signature = inspect.signature(function)
    if not signature.parameters:
        raise UserError(f"metric '{name}' takes no argument; a metric is a function of the conversation")

    def build(**options: Any) -> Metric:
        return FunctionMetric(function, name, options)

    others = list(signature.parameters.values())[1:]
    build.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
    build.__annotations__ = getattr(function, "__annotations__", {})
    build.__wrapped__ = function  # type: ignore[attr-defined]  # whose module its annotations are read in
    return build


metrics = MetricRegistry("metric", "upshot.rewards.metrics", base=Metric, functions=True)
"""Metrics that a recipe can name in `reward.metrics`."""


@metrics.register("verifier")
class VerifierMetric(Metric):
    """What the environment decided at the end of its session, else the verdict on the task's claim."""

    def __init__(self, task: Task, manager: Manager | None = None) -> None:
        self.task, self.manager = task, manager

    async def score(self, conversation: Conversation) -> Score:
        """The environment's own score when it gave one, else the reward manager's, else the task's."""
        if conversation.score is not None:
            return Score.of(conversation.score, "the environment")
        task, manager = self.task, self.manager
        claim = limit_call_now(task, task.claim, conversation) if manager is not None else None
        if claim is None or manager is None:
            return Score.of(await limit_call(task, task.verify, conversation), f"task '{task.name}'")
        return await manager.verify(claim)
