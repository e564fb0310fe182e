"""Replies rated by a judge model: with your rubric file, or by one of the built-in behaviours."""

from __future__ import annotations

from typing import Any

from upshot.errors import UserError
from upshot.tasks.base import tasks
from upshot.tasks.verified import VerifiedTask
from upshot.verifiers.base import verifiers
from upshot.verifiers.judged import JudgedVerifier, with_rubric_read


@tasks.register("judged")
class Judged(VerifiedTask):
    """Requests whose replies a judge rates."""

    name = "judged"
    verifier = "judged"

    def __init__(
        self,
        rubric: str = "",
        low: int = 1,
        high: int = 10,
        behaviour: str = "",
        **rows: Any,
    ) -> None:
        """Make the task.

        rubric: a text or the path of a .txt or .md file, with ratings from low to high.
        behaviour: sycophancy, confidence, longer-response, unsafe-compliance or general-quality instead.
        """
        super().__init__(**rows)
        if bool(rubric) == bool(behaviour):
            raise UserError("task 'judged' needs one of 'rubric' (a text or file) and 'behaviour'")
        if behaviour:
            kind = verifiers.get(behaviour, "task.behaviour")
            if not (isinstance(kind, type) and issubclass(kind, JudgedVerifier)):
                raise UserError(f"task.behaviour '{behaviour}' is not judged by a model; use its own task")
        self.verifier = behaviour or "judged"
        options = {} if behaviour else with_rubric_read({"rubric": rubric, "low": low, "high": high})
        self._options: dict[str, Any] = options

    @property
    def verifier_options(self) -> dict[str, Any]:
        """The rubric."""
        return dict(self._options)
