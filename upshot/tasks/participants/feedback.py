"""An environment that needs only the conversation: feedback on what is wrong with a reply."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from upshot.core.conversation import Conversation, Message
from upshot.core.score import Score
from upshot.tasks.participants.base import Observation, Participant


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with a reply, and what the policy hears about it."""

    kind: str
    """format, arithmetic, wrong …: counted as '<kind>_errors'."""
    text: str


Review = Callable[[Conversation], Fault | None]
"""Checks the policy's last turn; None if nothing is wrong."""


@dataclass(eq=False)
class Feedback(Participant):
    """Tells the policy what is wrong, as a user message; done if nothing is.

    Counts per conversation: '<kind>_errors' (a turn with that fault), 'feedback' (a turn that answers feedback) and
    'feedback_used' (such a turn in which that fault is gone), both also by kind: '<kind>_feedback', '…_used'. The kinds
    matter: the easy ones disappear first, so the overall share can fall although each kind is corrected more often.
    """

    review: Review
    cost: float = 0.0
    """What a fault subtracts from the score of its turn, with credit by turns."""

    async def observe(self, conversation: Conversation) -> Observation:
        """The next thing that is wrong, if any."""
        fault = self.review(conversation)
        before: str | None = conversation.session.get("fault")
        metrics: dict[str, float] = {}
        if before is not None:
            used = float(fault is None or fault.kind != before)
            for name in ("feedback", f"{before}_feedback"):
                metrics |= {name: 1.0, f"{name}_used": used}
        conversation.session["fault"] = fault.kind if fault else None
        if fault is None:
            return Observation(done=True, reason="answered", metrics=metrics)
        metrics[f"{fault.kind}_errors"] = 1.0
        score = Score(-self.cost) if self.cost else None
        return Observation((Message("user", fault.text),), note={"fault": fault.kind}, metrics=metrics, score=score)
