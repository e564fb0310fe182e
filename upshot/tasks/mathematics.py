"""Mathematics with a reference answer: MATH and everything shaped like it. In several turns it says when an answer is
missing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from upshot.core.conversation import Conversation, Row
from upshot.tasks.base import tasks
from upshot.tasks.participants.base import Participant
from upshot.tasks.participants.feedback import Fault, Feedback
from upshot.tasks.verified import VerifiedTask
from upshot.tasks.verifiers.math.answer import final_answer

NO_ANSWER = "Your reply has no final answer. Put it in \\boxed{}."


@tasks.register("math", "hendrycks_math", "math-500")
class Mathematics(VerifiedTask):
    """Problems whose final answer goes in a box."""

    verifier = "math"
    hub = "DigitalLearningGmbH/MATH-lighteval"
    instructions = "Think step by step and put the final answer in \\boxed{}."

    def __init__(self, mode: Literal["boxed", "flexible"] = "flexible", **rows: Any) -> None:
        """mode: boxed takes nothing but a box; flexible also 'the final answer is …' and the last expression."""
        super().__init__(**rows)
        self.verifier_options = {"mode": mode}

    def environment(self) -> Participant:
        """Says when there is no box."""
        return Feedback(self.review)

    def review(self, conversation: Conversation) -> Fault | None:
        """A missing box; it does not say whether the answer is right."""
        return Fault("format", NO_ANSWER) if self.format_error(self.response(conversation) or "") else None

    def format_error(self, text: str) -> str:
        """No box."""
        return "" if final_answer(text, boxed_only=True) is not None else "no \\boxed answer"


@tasks.register("deepscaler")
class DeepScaleR(Mathematics):
    """DeepScaleR's collection of competition problems; every source of its rows is checked as mathematics."""

    verifies_all = True
    hub = "agentica-org/DeepScaleR-Preview-Dataset"
    instructions = "Put your final answer within \\boxed{}."

    def parse(self, record: Mapping[str, Any]) -> Row:
        """A record as a row; its answer is the reference, not its solution."""
        if "answer" in record and not record.get("reward_model"):
            question = record.get("problem") or record.get("prompt") or record.get("question")
            record = {"problem": question, "answer": record["answer"]}
        return super().parse(record)
