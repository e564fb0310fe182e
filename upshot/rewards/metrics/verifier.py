"""The task's own verdict on the finished conversation."""

from __future__ import annotations

from upshot.core.conversation import Conversation
from upshot.core.score import Score
from upshot.core.time_limit import limit_call, limit_call_now
from upshot.rewards.metric import Metric, metrics
from upshot.rewards.workers.base import Manager
from upshot.tasks.base import Task


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
