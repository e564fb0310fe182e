"""Helpers for the tests of this folder: models whose answers depend on the prompt, and an event loop with a virtual
clock."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Coroutine
from typing import Any

from upshot.config.model_spec import ModelSpec
from upshot.config.sampling import Sampling
from upshot.core.conversation import Message, Row
from upshot.models.base import Completion, Model, Request
from upshot.models.scripted import ScriptedModel
from upshot.rewards.build import build_metric
from upshot.rewards.credit import MetricWeight
from upshot.rollout.episode import Policy
from upshot.rollout.futures.talk import Talk
from upshot.rollout.play import RolloutContext
from upshot.tasks.users.llm import LLMUser


def number_of(text: str) -> int:
    """The number of the goal in a prompt or a conversation; 0 if there is none."""
    found = set(re.findall(r"goal-(\d+)", text))
    assert len(found) <= 1, f"goals {sorted(found)} met in one prompt"
    return int(found.pop()) if found else 0


def act(prompt: str) -> str:
    """What a model says to a prompt, in the role that the prompt implies. Ratings encode the goal's number and are
    never 0."""
    number = number_of(prompt)
    if prompt.startswith("You play a person"):
        return json.dumps({"current_answer": "not yet", "thought": "hm", "response": f"I mean goal-{number}, please."})
    if '"accuracy":' in prompt:
        return json.dumps({"thought": "ok", "accuracy": 1})
    if '"interactivity":' in prompt:
        return json.dumps({"thought": "ok", "interactivity": (number + 1) / 1000})
    return f"Let us look at it: goal-{number}." if number else "What is it about?"


def shown(request: Request) -> str:
    """All text of a request."""
    return "\n".join(message.content for message in request.prompt)  # type: ignore[union-attr]


def actor(latency: float = 0.0, concurrency: int = 512, say: Callable[[str], str | Completion] = act) -> ScriptedModel:
    """A scripted model that plays every role."""
    spec = ModelSpec(model="scripted:ok", latency_s=latency, concurrency=concurrency)
    return ScriptedModel(spec, lambda request: say(shown(request)))


def rows(number: int) -> list[Row]:
    """Rows with distinguishable goals."""
    opening = (Message("user", "Can you help me?"),)
    return [Row(f"row{i}", opening, f"Sort out goal-{i + 1} for me.", f"done {i + 1}") for i in range(number)]


def scene(
    model: Model, samples: int = 1, rounds: int = 2, names: tuple[str, ...] = ("accuracy", "interactivity")
) -> RolloutContext:
    """One model as policy, user and judge, two judged metrics."""
    metrics = {name: build_metric(name, judge=model) for name in names}
    weights = {name: MetricWeight(1.0, (-1.0, 1.0), metric.intrinsic) for name, metric in metrics.items()}
    policy = Policy(model, sampling=Sampling(max_tokens=64))
    return RolloutContext(policy, Talk(metrics, weights, LLMUser(model), samples, rounds))


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer: sleeping costs nothing, and load does not change the
    result."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def time(self) -> float:
        """Seconds that have been slept."""
        return self.now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            self.now = max(self.now, self._scheduled[0]._when)  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


def run_virtual(work: Callable[[], Coroutine[Any, Any, Any]]) -> tuple[Any, float]:
    """The result of a coroutine and the virtual seconds it took."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        result = runner.run(work())
        return result, runner.get_loop().time()
