"""REINFORCE++: the whole step is the baseline, not the group."""

from __future__ import annotations

from typing import Literal

from upshot.rewards.advantages.base import Advantages, Step, combinations, estimators, part
from upshot.rewards.advantages.gdpo import over_the_step
from upshot.rewards.advantages.grouped import centred


@estimators.register("reinforce++")
def reinforce_plus_plus(step: Step, baseline: Literal["step", "group"] = "step") -> Advantages:
    """Rewards shifted and scaled over the step; `baseline: group` takes the mean of each group off before."""
    compare = centred if baseline == "group" else list
    own = [
        {parts: compare([part(credit, parts) for credit in group]) for parts in combinations(group)} for group in step
    ]
    return over_the_step(step, own)
