"""The conversation goes on: simulated user and policy talk on, and its metrics are averaged over the futures.

CollabLLM's multiturn-aware reward. With `rounds: 0` the reply is scored as it stands, which is task training.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace

from upshot.config.recipe import CreditConfig
from upshot.core.conversation import Conversation
from upshot.core.stopwatch import at_work
from upshot.rewards.credit import Credit, relabel, token_ranges
from upshot.rewards.metric import Metric
from upshot.rewards.reward import MetricWeight, Reward
from upshot.rollout.credit.base import credit_rule
from upshot.rollout.episode import play_future
from upshot.rollout.futures.base import Futures, kinds
from upshot.rollout.play import catch_failure, score_conversation
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
        samples: int | Sequence[int] = 1,
        rounds: int = 0,
        credit: CreditConfig | None = None,
        with_user: bool = False,
    ) -> None:
        self.metrics = metrics
        self.weights = weights
        self.shared = {name: how for name, how in weights.items() if how.tokens == "all"}
        """Those of the main reward; the others are parts of their own."""
        self.user = user if rounds else None
        self.rounds = rounds
        self.with_user = with_user
        self.samples = (samples,) if isinstance(samples, int) else tuple(samples)
        """Ways on at each fork: at the reply, and where there are more at the rounds after it."""
        self.rule = credit_rule(credit or CreditConfig())
        self.every_turn = not self.rule.one_reward and self.user is not None

    async def play(self, reply: Rollout, policy: Policy) -> None:
        """Play and score all futures at once; one is scored as soon as it ends."""
        turn_snapshots = reply.turn_snapshots if self.every_turn else [reply.conversation]
        async with asyncio.TaskGroup() as tasks:
            played = [
                tasks.create_task(self._follow(moment, policy, turn, (index,), (len(moment.turns),)))
                for turn, moment in enumerate(turn_snapshots)
                # Without a next turn all futures would be the same conversation: one is enough.
                for index in range(self.samples[0] if self._goes_on(moment) else 1)
            ]
        reply.futures = [future for task in played for future in task.result()]

    async def _follow(
        self, moment: Conversation, policy: Policy, turn: int, path: tuple[int, ...], forks: tuple[int, ...]
    ) -> list[Future]:
        """The futures that take one way on from a moment: one, or several where it forks again after a round."""
        fork = moment.fork("future", path[-1])
        future = Future(fork, shared=forks[0], turn=turn, path=path, forks=forks)
        failure = None
        if self.user is not None and self._goes_on(moment):
            future.by = "user"
            played, last = len(path) - 1, len(path) == len(self.samples)
            rounds, ended = (self.rounds - played, "rounds") if last else (1, None)
            with at_work("futures"):
                failure = await catch_failure(play_future(fork, self.user, policy, rounds, ended), "future")
            if failure is None and fork.ended is None:
                return await self._fork_again(fork, policy, turn, path, forks)
        else:
            fork.ended = moment.ended
        if failure is not None:
            future.missing = failure.reason
            future.scores = dict.fromkeys(self.metrics, failure)
        else:
            future.scores = await score_conversation(self.metrics, fork)
        return [future]

    async def _fork_again(
        self, moment: Conversation, policy: Policy, turn: int, path: tuple[int, ...], forks: tuple[int, ...]
    ) -> list[Future]:
        further = (*forks, len(moment.turns))
        async with asyncio.TaskGroup() as tasks:
            played = [
                tasks.create_task(self._follow(moment, policy, turn, (*path, index), further))
                for index in range(self.samples[len(path)])
            ]
        return [future for task in played for future in task.result()]

    async def rescore(self, reply: Rollout) -> None:
        """All metrics of all futures that were played to their end."""
        played = [future for future in reply.futures if not future.cut and future.missing is None]
        scores = await asyncio.gather(*(score_conversation(self.metrics, future.conversation) for future in played))
        for future, found in zip(played, scores, strict=True):
            future.scores = found

    def worst(self, reply: Rollout, name: str, values: Sequence[float]) -> float:
        """The lowest; the highest of a metric that is weighed negatively."""
        return max(values) if name in self.weights and self.weights[name].weight < 0 else min(values)

    def _goes_on(self, moment: Conversation) -> bool:
        """Whether futures have turns of their own: not where the policy could not answer them (no room left) or has
        ended the conversation by a tool, nor where the user has taken part in the episode and left."""
        if self.user is None or moment.ended in ("length", "policy"):
            return False
        return not self.with_user or moment.ended in (None, "turns")

    def score(self, reply: Rollout) -> tuple[Reward, Credit]:
        """The weighted metrics, averaged over the futures, credited by the recipe's rule."""
        talks = [future for future in reply.futures if not future.cut]
        reward, credit = self.rule.score(reply, talks, self.shared, self.weights, self.every_turn)
        return reward, self._with_parts(credit, reply, reward)

    def _with_parts(self, credit: Credit, reply: Rollout, reward: Reward) -> Credit:
        """The credit with the metrics that only thoughts or answers earn, each as a part of its own."""
        spans, parts = credit.spans, dict(credit.parts)
        for name, how in self.weights.items():
            if how.tokens != "all" and how.weight:
                parts[name] = reward.terms[name]
                for start, stop in token_ranges(reply.conversation, how.tokens):
                    spans = relabel(spans, start, stop, (name,))
        return replace(credit, parts=parts, spans=spans)

    def credit_for(self, reply: Rollout, reward: Reward) -> Credit:
        """See `Futures`."""
        return self.rule.credit(reply, reward.total)


@kinds.register("none")
class NoFutures(Talk):
    """The reply as it stands: the baseline of every other kind."""

    def __init__(
        self, metrics: Mapping[str, Metric], weights: Mapping[str, MetricWeight], credit: CreditConfig | None = None
    ) -> None:
        super().__init__(metrics, weights, credit=credit)
