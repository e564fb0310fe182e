"""Instruction following: rows with IFEval constraints."""

from __future__ import annotations

from typing import Any, Literal

from upshot.tasks.base import tasks
from upshot.tasks.verified import VerifiedTask


@tasks.register("constraints", "ifeval")
class Constraints(VerifiedTask):
    """Requests with conditions that a program can check."""

    name = "constraints"
    verifier = "constraints"
    hub = "google/IFEval"

    def __init__(
        self,
        file: str | None = None,
        train_file: str | None = None,
        validation_file: str | None = None,
        test_file: str | None = None,
        held_out: float = 0.1,
        limit: int | None = None,
        split_seed: int = 0,
        system: str = "",
        mode: Literal["strict", "loose"] = "strict",
        partial: bool = False,
    ) -> None:
        """partial: reward the share of kept constraints instead of all or nothing."""
        super().__init__(file, train_file, validation_file, test_file, held_out, limit, split_seed, None, system)
        self._options = {"mode": mode, "partial": partial}

    @property
    def verifier_options(self) -> dict[str, Any]:
        """The reading and whether parts count."""
        return dict(self._options)
