"""The conversation goes on: simulated user and policy talk on, and its metrics are averaged over the futures.

CollabLLM's multiturn-aware reward. With `rounds: 0` the reply is scored as it stands, which is task training.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace

from upshot.core.conversation import Conversation
from upshot.core.score import Score
from upshot.core.stopwatch import at_work
from upshot.rewards.credit import MAIN, Credit, credit_turns, only, sampled_spans
from upshot.rewards.metric import Metric
from upshot.rewards.reward import MetricWeight, Reward, combine
from upshot.rollout.episode import play_future
from upshot.rollout.futures.base import CreditRule, Futures, kinds
from upshot.rollout.guard import guard, score_conversation
from upshot.rollout.policy import Policy
from upshot.rollout.rollout import Future, Rollout
from upshot.tasks.participants.base import Participant


@kinds.register("talk")
class Talk(Futures):
    """`samples` futures of up to `rounds` rounds, each a turn of the user and one of the policy."""

    def __init__(
        self,
        metrics: Mapping[str, Metric],
        weights: Mapping[str, MetricWeight],
        user: Participant | None = None,
        samples: int = 1,
        rounds: int = 0,
        credit: CreditRule | None = None,
    ) -> None:
        self.metrics = metrics
        self.weights = weights
        self.user = user if rounds else None
        self.rounds = rounds
        self.samples = samples
        self.credit = credit or CreditRule()
        self.every_turn = self.credit.by == "turns" and self.user is not None

    async def play(self, reply: Rollout, policy: Policy) -> None:
        """Play and score all futures at once; one is scored as soon as it ends."""
        turn_snapshots = reply.turn_snapshots if self.every_turn else [reply.conversation]
        async with asyncio.TaskGroup() as tasks:
            played = [
                tasks.create_task(self._future(moment, policy, index, turn))
                for turn, moment in enumerate(turn_snapshots)
                # Without a next turn all futures would be the same conversation: one is enough.
                for index in range(self.samples if self._goes_on(moment) else 1)
            ]
        reply.futures = [task.result() for task in played]

    async def _future(self, moment: Conversation, policy: Policy, index: int, turn: int) -> Future:
        fork = moment.fork("future", index)
        future = Future(fork, shared=len(moment.turns), turn=turn)
        failure = None
        if self.user is not None and self._goes_on(moment):
            future.by = "user"
            with at_work("futures"):
                failure = await guard(play_future(fork, self.user, policy, self.rounds), "future")
        else:
            fork.ended = moment.ended
        if failure is not None:
            future.missing = failure.reason
            future.scores = dict.fromkeys(self.metrics, failure)
        else:
            future.scores = await score_conversation(self.metrics, fork)
        return future

    async def rescore(self, reply: Rollout) -> None:
        """All metrics of all futures that were played to their end."""
        played = [future for future in reply.futures if not future.cut and future.missing is None]
        scores = await asyncio.gather(*(score_conversation(self.metrics, future.conversation) for future in played))
        for future, found in zip(played, scores, strict=True):
            future.scores = found

    def _goes_on(self, moment: Conversation) -> bool:
        """Whether futures have turns of their own; in an episode that ran out of room nobody could answer them."""
        return self.user is not None and moment.ended != "length"

    def settle(self, reply: Rollout) -> tuple[Reward, Credit]:
        """The weighted metrics, averaged over the futures; to the whole reply, or turn by turn."""
        own = [future for future in reply.futures if not future.cut]
        reward = combine([future.scores for future in own], self.weights)
        if not self.every_turn:
            return reward, self.decided(reply, reward)
        by_turn = [
            combine([future.scores for future in own if future.turn == turn], self.weights).total
            for turn in range(len(reply.turn_snapshots))
        ]
        return reward, self._by_turns(reply, by_turn)

    def decided(self, reply: Rollout, reward: Reward) -> Credit:
        """The reward to all trained tokens; by turns to the last one, after what the environment gave each of them."""
        conversation = reply.conversation
        if self.credit.by == "turns":
            given = conversation.session.get("turn_scores", {})
            rewards = [given.get(turn, Score(0.0)) for turn, _ in enumerate(conversation.samples())]
            return self._by_turns(reply, [*rewards[:-1], *[_plus(own, reward.total) for own in rewards[-1:]]])
        spans = only(sampled_spans(conversation.mask), conversation, self.credit.tokens)
        return Credit({MAIN: reward.total}, spans)

    def _by_turns(self, reply: Rollout, rewards: Sequence[Score]) -> Credit:
        credit = credit_turns(rewards, reply.conversation, self.credit.gamma, self.credit.split)
        return replace(credit, spans=only(credit.spans, reply.conversation, self.credit.tokens))


@kinds.register("none")
class NoFutures(Talk):
    """The reply as it stands: the baseline of every other kind."""

    def __init__(
        self, metrics: Mapping[str, Metric], weights: Mapping[str, MetricWeight], credit: CreditRule | None = None
    ) -> None:
        super().__init__(metrics, weights, credit=credit)


def _plus(one: Score, other: Score) -> Score:
    if one.value is None or other.value is None:
        return one if one.value is None else other
    return Score(one.value + other.value)
