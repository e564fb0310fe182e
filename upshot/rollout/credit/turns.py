"""Credit by turns: each turn of the policy earns what it led to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from upshot.core.score import Score
from upshot.rewards.credit import Credit, Reward, combine, credit_turns, plus, restrict_to
from upshot.rollout.credit.rules import CreditRule, ScoredFutures, mean_by_way, rules
from upshot.rollout.reply import Rollout


@rules.register("turns")
class ByTurns(CreditRule):
    """Each turn earns the reward of the futures forked after it, or without such futures the conversation's reward,
    plus what the environment gave for it and for later turns."""

    one_reward = False

    def __init__(self, tokens: str, gamma: float, split: bool) -> None:
        self.tokens, self.gamma, self.split = tokens, gamma, split

    def credit(self, reply: Rollout, total: Score) -> Credit:
        """The reward to the last turn, after what the environment gave each of them."""
        rewards = _environment_scores(reply)
        return self._credit(reply, [*rewards[:-1], *(plus(score, total) for score in rewards[-1:])])

    def score(self, reply: Rollout, scored: ScoredFutures) -> tuple[Reward, Credit]:
        """Every turn's own futures tell how the whole conversation ends from there: they are its return already."""
        if not scored.every_turn:
            return super().score(reply, scored)
        turns = range(len(reply.turn_snapshots))
        by_turn = [mean_by_way([future for future in scored.futures if future.turn == turn]) for turn in turns]
        ends = [combine(scores, scored.main_weights).total for scores in by_turn]
        reward = combine(list(chain.from_iterable(by_turn)), scored.weights)
        return reward, self._credit(reply, _environment_scores(reply), ends)

    def _credit(self, reply: Rollout, rewards: Sequence[Score], ends: Sequence[Score] = ()) -> Credit:
        credit = credit_turns(rewards, reply.conversation, self.gamma, self.split, ends)
        return replace(credit, spans=restrict_to(credit.spans, reply.conversation, self.tokens))


def _environment_scores(reply: Rollout) -> list[Score]:
    """What the environment gave for each turn of the policy; 0 where it gave nothing."""
    conversation = reply.conversation
    return [conversation.turn_scores.get(turn, Score(0.0)) for turn, _ in enumerate(conversation.samples())]
