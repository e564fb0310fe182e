"""Short answers compared as text: any set of them, HotpotQA, and Natural Questions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from upshot.core.conversation import Row
from upshot.tasks.base import tasks
from upshot.tasks.verified import VerifiedTask


@tasks.register("exact-match")
class ExactMatch(VerifiedTask):
    """Questions with one or several accepted short answers."""

    verifier = "exact-match"
    instructions = "End with your answer between <answer> and </answer>."

    def __init__(self, mode: Literal["exact", "contains", "f1"] = "exact", **rows: Any) -> None:
        """mode: exact, contains (the reference occurs in the answer), f1 (graded by shared words)."""
        super().__init__(**rows)
        self.verifier_options = {"mode": mode}


class BoxedAnswer(VerifiedTask):
    """Questions of a published set, answered in a box; its rows are scored by the task's own verifier."""

    verifies_all = True
    instructions = "Put your final answer within \\boxed{}."


@tasks.register("hotpotqa")
class HotpotQa(BoxedAnswer):
    """Questions that need two facts; the one answer is compared as text."""

    verifier = "hotpotqa"
    verifier_options: Mapping[str, Any] = {"mode": "exact", "boxed": True}
    hub = "hotpotqa/hotpot_qa@distractor"


@tasks.register("nq")
class NaturalQuestions(BoxedAnswer):
    """NQ-open: questions that people typed; one of the accepted answers must be in the box."""

    verifier = "nq"
    verifier_options: Mapping[str, Any] = {"mode": "contains", "boxed": True}
    hub = "google-research-datasets/nq_open"

    def parse(self, record: Mapping[str, Any]) -> Row:
        """A record as a row; bare questions come without capital and question mark."""
        question = record.get("question")
        if isinstance(question, str) and question and not record.get("prompt"):
            record = {**record, "question": f"{question[0].upper()}{question[1:].rstrip('?')}?"}
        return super().parse(record)
