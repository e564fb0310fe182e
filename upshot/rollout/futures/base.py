"""Futures: how a reply is continued, what that is worth, and which of its tokens earned it.

A kind of future is one file here with `@kinds.register("name")`, or `my_pkg.module:Kind` in the recipe. Its constructor
takes its options and, where it names them, what the program has (`rollout/dependencies.py`): `metrics` and `weights`
(the reward's), `user`, `task`, `models`, `manager`, `credit` (the recipe's section), `renderer` (of the policy),
`judge`, `sandbox`, `seed`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from upshot.config.registry import Registry
from upshot.core.errors import UserError
from upshot.core.helper import Helper
from upshot.rewards.credit import Credit
from upshot.rewards.reward import Reward
from upshot.rollout.reply import Rollout
from upshot.rollout.speaker import Policy


class Futures(Helper, ABC):
    """Continues replies and says what they are worth. Serves all replies at once, keeps nothing of a single one."""

    every_turn: bool = False
    """Whether it continues the episode after every turn of the policy (`Rollout.turn_snapshots`), not after the last
    alone."""

    @abstractmethod
    async def play(self, reply: Rollout, policy: Policy) -> None:
        """Continue the reply and score where that leads: fills `reply.futures`. What fails fails alone, as missing."""

    @abstractmethod
    def score(self, reply: Rollout) -> tuple[Reward, Credit]:
        """The reward of a played reply, and the tokens that earned its parts."""

    @abstractmethod
    def credit_for(self, reply: Rollout, reward: Reward) -> Credit:
        """The tokens that earn a reward which was decided without any future."""

    def worst(self, reply: Rollout, name: str, values: Sequence[float]) -> float:
        """Which of the values of a score would earn the reply the least."""
        return min(values)

    async def rescore(self, reply: Rollout) -> None:
        """Score the reply's futures again as they are; nothing is continued."""
        raise UserError(f"futures of the kind '{type(self).__name__}' cannot be scored again")

    def measure(self, replies: Sequence[Rollout]) -> dict[str, float]:
        """Numbers of this kind over the replies of a step, for the metrics."""
        return {}

    async def start(self) -> None:
        """Load what must be loaded."""


kinds: Registry[Futures] = Registry(
    "kind of future", "upshot.rollout.futures", "upshot.rollout.futures.classmates", base=Futures
)
"""Futures that a recipe can name in `futures.name`."""
