"""One reward for the whole reply."""

from __future__ import annotations

from upshot.core.score import Score
from upshot.rewards.credit import MAIN, Credit, only, sampled_spans
from upshot.rollout.credit.base import CreditRule, rules
from upshot.rollout.reply import Rollout


@rules.register("reply")
class WholeReply(CreditRule):
    """The main reward to all trained tokens of the episode alike."""

    def __init__(self, tokens: str) -> None:
        self.tokens = tokens

    def credit(self, reply: Rollout, total: Score) -> Credit:
        """See `CreditRule`."""
        conversation = reply.conversation
        return Credit({MAIN: total}, only(sampled_spans(conversation.mask), conversation, self.tokens))
