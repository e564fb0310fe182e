"""Replies rated by a judge model with your rubric file, or for one of the built-in behaviours."""

from __future__ import annotations

from typing import Any

from upshot.config.bounds import Count, Whole
from upshot.core.errors import UserError
from upshot.tasks.base import tasks
from upshot.tasks.verified import VerifiedTask
from upshot.tasks.verifiers.base import Verifier, verifiers
from upshot.tasks.verifiers.judged import with_rubric_read


@tasks.register("judged")
class JudgedTask(VerifiedTask):
    """Requests whose replies a judge rates."""

    verifier = "judged"
    verifies_all = True

    def __init__(self, rubric: str = "", low: Whole = 1, high: Count = 10, behaviour: str = "", **rows: Any) -> None:
        """Make the task.

        rubric: a text or the path of a .txt or .md file, with ratings from low to high.
        behaviour: instead of a rubric, sycophancy, confidence, longer-response, bold-formatting, unsafe-compliance or
        general-quality. It takes precedence over the rows' own labels, so one file of prompts serves all of them.
        """
        super().__init__(**rows)
        if bool(rubric) == bool(behaviour):
            raise UserError("task 'judged' needs either 'rubric' (a text or file) or 'behaviour'")
        if behaviour and not is_behaviour(behaviour):
            raise UserError(f"task.behaviour '{behaviour}' compares with a reference; use its own task")
        self.verifier = behaviour or "judged"
        if rubric:
            self.verifier_options = with_rubric_read({"rubric": rubric, "low": low, "high": high})


def is_behaviour(name: str) -> bool:
    """Whether a verifier looks at the reply alone, so that any prompts will do."""
    kind = verifiers.get(name, "task.behaviour")
    return isinstance(kind, type) and issubclass(kind, Verifier) and "reference" not in kind.needs
