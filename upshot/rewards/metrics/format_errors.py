"""How often the policy broke the form the task asks for."""

from __future__ import annotations

from upshot.chat import Conversation
from upshot.rewards.metric import Metric, metrics
from upshot.score import Score
from upshot.tasks.base import Task


@metrics.register("format_errors")
class FormatErrors(Metric):
    """Share of the assistant's turns in bad form (no `####` line, say), in [0, 1]; a negative weight is the penalty."""

    intrinsic = True

    def __init__(self, task: Task) -> None:
        self.task = task

    async def score(self, conversation: Conversation) -> Score:
        """The share; missing when the assistant said nothing."""
        turns = conversation.turns[len(conversation.row.messages) :]
        said = [turn.message for turn in turns if turn.message.role == "assistant"]
        if not said:
            return Score.missing("format_errors: no assistant turn")
        faults = [fault for message in said if (fault := self.task.format_error(message.content))]
        return Score(len(faults) / len(said), detail={"faults": faults})
