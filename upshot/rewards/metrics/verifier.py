"""The task's own verdict on the finished conversation."""

from __future__ import annotations

from upshot.chat import Conversation
from upshot.rewards.metric import Metric, metrics
from upshot.score import Score
from upshot.tasks.base import Task


@metrics.register("verifier")
class Verifier(Metric):
    """What `task.verify` says, or what the environment itself decided at the end of its session."""

    def __init__(self, task: Task) -> None:
        self.task = task

    async def score(self, conversation: Conversation) -> Score:
        """The environment's own score when it gave one, else the task's verdict."""
        own = conversation.session.get("score")
        return own if isinstance(own, Score) else await self.task.verify(conversation)
