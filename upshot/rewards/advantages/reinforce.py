"""REINFORCE++: the whole step is the baseline, not the group."""

from __future__ import annotations

from itertools import chain
from typing import Literal

from upshot.rewards.advantages.gdpo import over_the_step
from upshot.rewards.advantages.grouped import Advantages, Step, centred, combinations, comparable, estimators, sums_of


@estimators.register("reinforce++")
def reinforce_plus_plus(step: Step, baseline: Literal["step", "group"] = "step") -> Advantages:
    """Rewards shifted and scaled over the step; `baseline: group` first subtracts the mean of each group."""
    grouped = baseline == "group"
    compare = centred if grouped else list
    replies = iter(comparable(list(chain.from_iterable(step))))
    groups = [comparable(group) if grouped else [next(replies) for _ in group] for group in step]
    rewards = [{parts: compare(sums_of(group, parts)) for parts in combinations(group)} for group in groups]
    return over_the_step(groups, rewards)
