"""Short answers compared as text."""

from __future__ import annotations

from typing import Any, Literal

from upshot.tasks.base import tasks
from upshot.tasks.verified import VerifiedTask


@tasks.register("exact-match")
class ExactMatch(VerifiedTask):
    """Questions with one or several accepted short answers."""

    name = "exact-match"
    verifier = "exact-match"
    instructions = "End with your answer between <answer> and </answer>."

    def __init__(
        self,
        mode: Literal["exact", "contains", "f1"] = "exact",
        **rows: Any,
    ) -> None:
        """mode: exact, contains (the reference occurs in the answer), f1 (graded by shared words)."""
        super().__init__(**rows)
        self.verifier_options = {"mode": mode}
