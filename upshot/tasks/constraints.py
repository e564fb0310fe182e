"""Instruction following: rows with IFEval constraints."""

from __future__ import annotations

from typing import Any, Literal

from upshot.tasks.base import tasks
from upshot.tasks.verified import VerifiedTask


@tasks.register("constraints", "ifeval")
class Constraints(VerifiedTask):
    """Requests with conditions that a program can check."""

    verifier = "constraints"
    hub = "google/IFEval"

    def __init__(self, mode: Literal["strict", "loose"] = "strict", partial: bool = False, **rows: Any) -> None:
        """partial: reward the share of kept constraints instead of all or nothing."""
        super().__init__(**rows)
        self.verifier_options = {"mode": mode, "partial": partial}
