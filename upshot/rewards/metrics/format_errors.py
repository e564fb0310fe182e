"""How often the policy broke the form the task asks for."""

from __future__ import annotations

from upshot.core.conversation import Conversation
from upshot.core.score import Reason, Score
from upshot.core.time_limit import limit_call_now
from upshot.rewards.metric import Metric, metrics
from upshot.tasks.base import Task


@metrics.register("format_errors")
class FormatErrors(Metric):
    """Share of the assistant's turns in bad form (no `####` line, for example); use a negative weight as a penalty."""

    intrinsic = True

    def __init__(self, task: Task) -> None:
        self.task = task

    async def score(self, conversation: Conversation) -> Score:
        """The share; missing when the assistant said nothing."""
        faults = limit_call_now(self.task, self.task.format_faults, conversation)
        if not faults:
            return Score.missing(Reason.NOTHING_SAID, "format_errors: no assistant turn")
        bad = [fault for fault in faults if fault]
        return Score(len(bad) / len(faults), detail={"faults": bad})
