"""Futures: how a reply is continued, what that is worth, and which of its tokens earned it.

The kind `talk` is CollabLLM's multiturn-aware reward: the conversation goes on, simulated user and policy talk on, and
the metrics are averaged over the futures. With `rounds: 0` the reply is scored as it stands, which is task training.

Another kind is one file beside this with `@kinds.register("name")`, or `my_pkg.module:Kind` in the recipe. Its
constructor takes its options and, where it names them, what the program has (`rollout/dependencies.py`): `metrics` and
`weights` (the reward's), `user`, `task`, `models`, `manager`, `credit` (the recipe's section), `renderer` (of the
policy), `judge`, `sandbox`, `seed`.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from upshot.config.recipe import CreditConfig
from upshot.config.recipe.episode import ROUNDS, SAMPLES
from upshot.config.registry import Registry
from upshot.core.conversation import Conversation
from upshot.core.errors import UserError
from upshot.core.event_loop import at_work, gather
from upshot.core.helper import Helper
from upshot.rewards.credit import Credit, MetricWeight, Reward, relabel, token_ranges
from upshot.rewards.metric import Metric, score_conversation
from upshot.rollout.credit.rules import ScoredFutures, credit_rule
from upshot.rollout.episode import Policy, catch_failure, play_future
from upshot.rollout.reply import Future, Rollout
from upshot.tasks.participants.base import Participant


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


@kinds.register("talk")
@dataclass(eq=False)
class Talk(Futures):
    """`samples` futures of up to `rounds` rounds, each a turn of the user and one of the policy."""

    metrics: Mapping[str, Metric]
    weights: Mapping[str, MetricWeight]
    user: Participant | None = None
    samples: int | Sequence[int] = SAMPLES
    rounds: int = ROUNDS
    credit: CreditConfig | None = None
    with_user: bool = False
    """Whether the user took part in the episode; once it has left, nothing is continued."""

    def __post_init__(self) -> None:
        self.user = self.user if self.rounds else None
        self.ways = (self.samples,) if isinstance(self.samples, int) else tuple(self.samples)
        """Ways on at each fork: at the reply, and where there are more at the rounds after it."""
        self.rule = credit_rule(self.credit or CreditConfig())
        self.every_turn = not self.rule.one_reward and self.user is not None

    async def play(self, reply: Rollout, policy: Policy) -> None:
        """Play and score all futures at once; one is scored as soon as it ends."""
        turn_snapshots = reply.turn_snapshots if self.every_turn else [reply.conversation]
        branches = [
            self._follow(moment, policy, turn, (index,), (len(moment.turns),))
            for turn, moment in enumerate(turn_snapshots)
            # Without a next turn all futures would be the same conversation: one is enough.
            for index in range(self.ways[0] if self._goes_on(moment) else 1)
        ]
        reply.futures = list(chain.from_iterable(await gather(branches)))

    async def _follow(
        self, moment: Conversation, policy: Policy, turn: int, path: tuple[int, ...], forks: tuple[int, ...]
    ) -> list[Future]:
        """The futures that take one way on from a moment: one, or several where it forks again after a round."""
        fork = moment.fork("future", path[-1])
        future = Future(fork, shared=forks[0], turn=turn, path=path, forks=forks)
        failure = None
        if self.user is not None and self._goes_on(moment):
            future.by = "user"
            played, last = len(path) - 1, len(path) == len(self.ways)
            rounds, ended = (self.rounds - played, "rounds") if last else (1, None)
            with at_work("futures"):
                failure = await catch_failure(play_future(fork, self.user, policy, rounds, ended), "future")
            if failure is None and fork.ended is None:
                branches = [
                    self._follow(fork, policy, turn, (*path, index), (*forks, len(fork.turns)))
                    for index in range(self.ways[len(path)])
                ]
                return list(chain.from_iterable(await gather(branches)))
        else:
            fork.ended = moment.ended
        if failure is not None:
            future.missing = failure.reason
            future.scores = dict.fromkeys(self.metrics, failure)
        else:
            future.scores = await score_conversation(self.metrics, fork)
        return [future]

    async def rescore(self, reply: Rollout) -> None:
        """All metrics of all futures that were played to their end."""
        played = [future for future in reply.futures if not future.cut and future.missing is None]
        scores = await asyncio.gather(*(score_conversation(self.metrics, future.conversation) for future in played))
        for future, again in zip(played, scores, strict=True):
            future.scores = again

    def worst(self, reply: Rollout, name: str, values: Sequence[float]) -> float:
        """The lowest; the highest of a metric that is weighted negatively."""
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
        main = {name: how for name, how in self.weights.items() if how.tokens == "all"}
        reward, credit = self.rule.score(reply, ScoredFutures(talks, self.weights, main, self.every_turn))
        # What only thoughts or answers earn is a part of its own.
        spans, parts = credit.spans, dict(credit.parts)
        for name, how in self.weights.items():
            if how.tokens != "all" and how.weight:
                parts[name] = reward.terms[name]
                for start, stop in token_ranges(reply.conversation, how.tokens):
                    spans = relabel(spans, start, stop, (name,))
        return reward, replace(credit, parts=parts, spans=spans)

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
