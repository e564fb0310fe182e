"""A credit rule says which of a reply's tokens earn its main reward.

The rules of recipes are below; a new one is a file beside this with `@rules.register("name")`, or is named by its path,
`my_pkg.module:Rule`. A constructor names what it takes of the recipe's `credit` (`tokens`, `gamma`, `split`, `forks`);
other parameters are options of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from upshot.config.recipe import CreditConfig
from upshot.config.registry import Registry, parameters_of
from upshot.core.errors import UserError
from upshot.core.score import Score
from upshot.rewards.credit import MAIN, Credit, MetricWeight, Reward, combine, credit_turns, only, plus, sampled_spans
from upshot.rollout.reply import Future, Rollout
from upshot.rollout.tree import draw, grow, mean_by_way


@dataclass(frozen=True, slots=True)
class ScoredFutures:
    """What a credit rule makes a reward of."""

    futures: Sequence[Future]
    weights: Mapping[str, MetricWeight]
    """How each metric enters the reward …"""
    main_weights: Mapping[str, MetricWeight]
    """… and those metrics among them that make up its main part."""
    every_turn: bool
    """Whether each turn of the policy has futures of its own, not the last one alone."""


class CreditRule(ABC):
    """Which tokens earn the main reward."""

    one_reward = True
    """Whether all trained tokens of a reply earn the same; False: its turns earn something of their own."""
    trains_futures = False
    """Whether what the policy says in the futures is trained as well."""

    @abstractmethod
    def credit(self, reply: Rollout, total: Score) -> Credit:
        """The tokens that earn the main reward of a reply."""

    def score(self, reply: Rollout, scored: ScoredFutures) -> tuple[Reward, Credit]:
        """The reward of a reply by its futures, and the tokens that earn the main part of it."""
        ways = mean_by_way(scored.futures)
        return combine(ways, scored.weights), self.credit(reply, combine(ways, scored.main_weights).total)


rules: Registry[CreditRule] = Registry("credit rule", "upshot.rollout.credit")
"""Rules that a recipe can name in `credit.by`."""
SHARED = ("tokens", "gamma", "split", "forks")
"""What rules may take of the recipe's section."""


def credit_rule(config: CreditConfig) -> CreditRule:
    """The rule of a recipe."""
    return rules.create(config.by, config.options, "credit", **{name: getattr(config, name) for name in SHARED})


def check_rule(config: CreditConfig) -> None:
    """Refuse an unknown rule, wrong options of it, and settings that it does not take."""
    rules.check(config.by, config.options, "credit", **dict.fromkeys(SHARED))
    named, _, _ = parameters_of(rules.get(config.by, "credit.by"))
    for name in SHARED:
        if name not in named and getattr(config, name) != type(config).model_fields[name].default:
            raise UserError(f"credit.{name} has no effect with credit.by={config.by}; leave it out")


@rules.register("reply")
class WholeReply(CreditRule):
    """The main reward to all trained tokens of the episode alike."""

    def __init__(self, tokens: str) -> None:
        self.tokens = tokens

    def credit(self, reply: Rollout, total: Score) -> Credit:
        """See `CreditRule`."""
        conversation = reply.conversation
        return Credit({MAIN: total}, only(sampled_spans(conversation.mask), conversation, self.tokens))


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
        return replace(credit, spans=only(credit.spans, reply.conversation, self.tokens))


def _environment_scores(reply: Rollout) -> list[Score]:
    """What the environment gave for each turn of the policy; 0 where it gave nothing."""
    conversation = reply.conversation
    return [conversation.turn_scores.get(turn, Score(0.0)) for turn, _ in enumerate(conversation.samples())]
