"""Policy gradient with a value head; see `training/loops/ppo.py`."""

from __future__ import annotations

from typing import Any

from upshot.config.method import methods
from upshot.training.methods.rl import RLMethod


@methods.register("ppo")
class PPOMethod(RLMethod):
    """A value head and GAE."""

    credits_tokens = compares = False
    value_head = True

    def prepare(self, learner: Any, groups: Any) -> Any:
        """See `TrainingMethod`."""
        from upshot.training.loops.ppo import prepare

        return prepare(learner, groups)
