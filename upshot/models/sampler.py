"""The model in training as rollouts see it: it samples by the newest weights, and may lend copies of itself.

The embedded engine (`training/snapshots.py`) and a vLLM server (`serving/vllm/policy.py`) implement it. What is not
overridden holds for a sampler that lends no copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from upshot.core.errors import UserError
from upshot.models.base import Model


class PolicySampler(Model):
    """Samples replies by the weights that the learner trains."""

    ahead: Sequence[Any] = ()
    """Copies of the policy that play steps ahead of the learner."""

    def weights_changed(self) -> None:
        """The learner has taken a step: what is sampled from now on comes from the new weights."""
        raise NotImplementedError

    async def rest(self, park: bool) -> None:
        """The learner works: give memory back, where the learner needs it."""

    def play_ahead(self, steps: int) -> None:
        """Have copies that play this many steps ahead; called before any other copy is asked for."""
        if steps:
            raise UserError("train.async_steps: this sampler holds one version of the weights; set it to 0")

    def renew(self, step: int) -> None:
        """The policy has taken this many steps: copies whose time it is take over its weights."""

    def resume_at(self, step: int) -> None:
        """The next step is this one; copies have been renewed for those before it."""

    def snapshot(self) -> Callable[[Path], None]:
        """What writes all copies into a checkpoint, as they are now."""
        return lambda folder: None

    def load_copies(self, folder: Path) -> None:
        """Take over the copies that a checkpoint kept."""

    def sync_times(self) -> dict[str, float]:
        """Seconds that handing weights over has taken since the last call."""
        return {}

    async def disconnect(self) -> None:
        """Nothing is sampled for now."""
