"""What a reply is given in: who speaks, how long, what becomes of a bad reply, and how it is continued."""

from __future__ import annotations

from dataclasses import dataclass, field

from upshot.core.conversation import Turn
from upshot.core.score import Reason, Score
from upshot.rewards.reward import Reward
from upshot.rollout.agents.runner import AgentRunner
from upshot.rollout.futures.base import Futures
from upshot.rollout.speaker import Policy, is_cut
from upshot.tasks.participants.base import Participant


@dataclass(frozen=True)
class ReplyRule:
    """What happens to a reply that is not as it should be: 'score' it as any other, 'missing', or a 'penalty'."""

    rule: str = "score"
    penalty: float = -1.0
    """The reward of such a reply under the rule 'penalty'; its futures are not played."""

    def reward(self, what: Reason) -> Reward | None:
        """The reward that the rule gives at once; None when the reply is scored as any other."""
        if self.rule == "score":
            return None
        return Reward(Score(self.penalty) if self.rule == "penalty" else Score.missing(what))


@dataclass
class RolloutContext:
    """Everything a step's replies are given, continued and settled with."""

    policy: Policy
    futures: Futures
    environment: Participant | None = None
    user: Participant | None = None
    """Who opens where a row has only a goal."""
    agent: AgentRunner | None = None
    """Whose program plays the episodes, instead of policy and environment in turns."""
    max_turns: int = 1
    hear_last: bool = True
    """Whether the environment is asked after the last turn, too: not where futures begin with asking the same one, or
    what it does then (a tool call, a line said) would be done twice."""
    overlong: ReplyRule = field(default_factory=ReplyRule)
    """For replies cut at the token limit."""
    malformed: ReplyRule = field(default_factory=ReplyRule)
    """For replies that say nothing and call no tool."""
    concurrency: int = 1024
    """Most episodes under way at once; their futures and metrics are bounded by the models' own limits."""

    def decide(self, turn: Turn) -> Reward | None:
        """The reward of a reply that a rule decides without futures; None when it is scored as any other."""
        if is_cut(turn):
            return self.overlong.reward(Reason.OVERLONG)
        if not turn.message.content.strip() and not turn.message.tool_calls:
            return self.malformed.reward(Reason.MALFORMED)
        return None
