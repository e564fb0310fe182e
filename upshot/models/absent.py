"""The policy where there is none: checks and replays build everybody else."""

from __future__ import annotations

from upshot.core.errors import UserError
from upshot.models.base import Completion, Model, Request


class AbsentPolicy(Model):
    """Stands in for the policy where nobody may ask it."""

    name = "policy"

    def frozen(self, when: str) -> Model:
        """Nobody's copy."""
        return self

    async def generate(self, request: Request) -> list[Completion]:
        """Refuse."""
        raise UserError("there is no policy here to ask; name another model for the role that asks it (models.…=)")
