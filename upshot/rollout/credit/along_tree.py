"""One reward for the reply, and what the policy says in its futures is trained too, beside its siblings of a fork."""

from __future__ import annotations

from upshot.rewards.credit import Credit
from upshot.rewards.reward import Reward
from upshot.rollout.credit.base import ScoredFutures, rules
from upshot.rollout.credit.whole_reply import WholeReply
from upshot.rollout.reply import Rollout
from upshot.rollout.tree import draw, grow


@rules.register("tree")
class AlongTree(WholeReply):
    """The reply as a whole, and every branch below it (`Rollout.siblings`)."""

    trains_futures = True

    def __init__(self, tokens: str, forks: float) -> None:
        super().__init__(tokens)
        self.forks = forks

    def score(self, reply: Rollout, scored: ScoredFutures) -> tuple[Reward, Credit]:
        """See `CreditRule`."""
        # Without forks (nobody went on) the reply itself is all that the policy said.
        if all(future.path and future.by for future in scored.futures):
            forks = grow(scored.futures, scored.main_weights, self.tokens)
            reply.siblings, reply.forks = draw(forks, self.forks), len(forks)
        return super().score(reply, scored)
