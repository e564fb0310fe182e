"""The monitor as a reward: a thought is worth how well a model that reads question and thought predicts the verdict.

`{name: monitor, model: watcher, tokens: thought, weight: 0.5}`: the thought earns it, the answer does not. Right or
wrong makes no difference, only whether one can tell; what is right is the business of other metrics.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from upshot.config.bounds import Count, Whole
from upshot.core.conversation import Conversation
from upshot.core.score import Reason, Score
from upshot.models.base import Model
from upshot.rewards.credit import Reward
from upshot.rewards.metric import Metric, VerifierMetric, metrics
from upshot.rewards.monitor import METRIC, Monitor, case_of
from upshot.rewards.workers.base import Manager
from upshot.tasks.base import Task
from upshot.tasks.participants.base import find_model


@metrics.register("monitor")
class MonitorMetric(Metric):
    """1 minus the distance between the verdict and a monitor's prediction of it from the thought."""

    intrinsic = True

    def __init__(
        self,
        task: Task,
        manager: Manager,
        models: Mapping[str, Model] | None = None,
        model: Any = "monitor",
        max_tokens: Count = 1024,
        repairs: Whole = 2,
    ) -> None:
        """model: a `Model`, or the name of one among the recipe's `models`. repairs: how often it is asked again."""
        self.task, self.manager = task, manager
        self.verifier = VerifierMetric(task, manager)
        self.monitor = Monitor(find_model("the monitor of reward.metrics", model, models or {}), max_tokens, repairs)

    async def score(self, conversation: Conversation) -> Score:
        """Missing where there is no thought, no verdict or no prediction."""
        verdict = await self.verifier.score(conversation)
        case = case_of(conversation, Reward(verdict, means={METRIC: verdict}), self.task, self.manager)
        if not case.thought.strip():
            return Score.missing(Reason.NO_THOUGHT, "the reply has no thought to read")
        if verdict.value is None:
            return verdict
        prediction = (await self.monitor.look(case)).prediction
        if prediction.value is None:
            return prediction
        detail = {**prediction.detail, "prediction": prediction.value, "verdict": verdict.value}
        return Score(1 - abs(prediction.value - verdict.value), detail=detail)
