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
        file: str | None = None,
        train_file: str | None = None,
        validation_file: str | None = None,
        test_file: str | None = None,
        held_out: float = 0.1,
        limit: int | None = None,
        split_seed: int = 0,
        instructions: str | None = None,
        system: str = "",
        mode: Literal["exact", "contains", "f1"] = "exact",
    ) -> None:
        """mode: exact, contains (the reference occurs in the answer), f1 (graded by shared words)."""
        super().__init__(
            file, train_file, validation_file, test_file, held_out, limit, split_seed, instructions, system
        )
        self.mode = mode

    @property
    def verifier_options(self) -> dict[str, Any]:
        """How answers are compared."""
        return {"mode": self.mode}
