"""A credit rule says which of a reply's tokens earn its main reward.

A rule is one file here with `@rules.register("name")`, or `my_pkg.module:Rule` in `credit.by`. Its constructor names
what it takes of the recipe's `credit` (`tokens`, `gamma`, `split`, `forks`); other parameters are options of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from upshot.config.recipe import CreditConfig
from upshot.config.registry import Registry, parameters_of
from upshot.core.errors import UserError
from upshot.core.score import Score
from upshot.rewards.credit import Credit
from upshot.rewards.reward import MetricWeight, Reward, combine
from upshot.rollout.reply import Future, Rollout
from upshot.rollout.tree import mean_by_way


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
