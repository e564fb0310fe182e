"""The task's own verdict on the finished conversation."""

from __future__ import annotations

from upshot.chat import Conversation
from upshot.rewards.managers.base import Manager
from upshot.rewards.metric import Metric, metrics
from upshot.score import Score
from upshot.tasks.base import Task


@metrics.register("verifier")
class Verifier(Metric):
    """What the environment decided at the end of its session, else the verdict on the task's claim."""

    def __init__(self, task: Task, manager: Manager | None = None) -> None:
        self.task = task
        self.manager = manager

    async def score(self, conversation: Conversation) -> Score:
        """The environment's own score when it gave one, else the reward manager's, else the task's."""
        own = conversation.session.get("score")
        if isinstance(own, Score):
            return own
        claim = self.task.claim(conversation) if self.manager is not None else None
        if claim is None or self.manager is None:
            return await self.task.verify(conversation)
        return await self.manager.verify(claim)
