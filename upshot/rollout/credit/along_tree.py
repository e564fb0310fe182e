"""One reward for the reply, and what the policy says in its futures is trained too, beside its siblings of a fork."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from upshot.rewards.credit import Credit
from upshot.rewards.reward import MetricWeight, Reward
from upshot.rollout.credit.base import rules
from upshot.rollout.credit.whole_reply import WholeReply
from upshot.rollout.rollout import Future, Rollout
from upshot.rollout.tree import draw, grow


@rules.register("tree")
class AlongTree(WholeReply):
    """The reply as a whole, and every branch below it (`Rollout.siblings`)."""

    trains_futures = True

    def __init__(self, tokens: str, forks: float) -> None:
        super().__init__(tokens)
        self.forks = forks

    def score(
        self,
        reply: Rollout,
        futures: Sequence[Future],
        shared: Mapping[str, MetricWeight],
        weights: Mapping[str, MetricWeight],
        every_turn: bool,
    ) -> tuple[Reward, Credit]:
        """See `CreditRule`."""
        # Without forks (nobody went on) the reply itself is all that the policy said.
        if all(future.path and future.by for future in futures):
            forks = grow(futures, shared, self.tokens)
            reply.siblings, reply.forks = draw(forks, self.forks), len(forks)
        return super().score(reply, futures, shared, weights, every_turn)
