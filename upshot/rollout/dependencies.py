"""What the program itself hands to things that a recipe names: a constructor gets what it has a parameter for.

That is how a metric of the user's own comes by the judge (`def __init__(self, judge, rubric)`) without being asked for
options it cannot give. Who needs most of it has one parameter `dependencies`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from upshot.config.recipe import CreditConfig
from upshot.models.base import Model
from upshot.models.rendering import Renderer
from upshot.rewards.credit import MetricWeight
from upshot.rewards.metric import Metric
from upshot.rewards.workers.base import Manager
from upshot.tasks.base import Task
from upshot.tasks.participants.base import Participant
from upshot.tasks.verifiers.profile_store import Verdicts


@dataclass(frozen=True)
class Dependencies:
    """What metrics, users and managers may be given."""

    task: Task | None = None
    judge: Model | None = None
    """The helper model of that name."""
    tokenizer: Any = None
    """The policy's."""
    models: Mapping[str, Model] = field(default_factory=dict)
    """All helper models by name."""
    sandbox: Any = None
    """A `CodeRunner`; None: nothing can be run."""
    verdicts: Verdicts | None = None
    """How the sandbox's results on a row become a verdict."""
    manager: Manager | None = None
    """Where verifiers run; None while the managers themselves are built."""

    def by_name(self) -> dict[str, Any]:
        """Keyword arguments for a registry."""
        return {name: getattr(self, name) for name in NAMES}


NAMES = tuple(one.name for one in fields(Dependencies))
"""What metrics, users and managers may name."""


@dataclass(frozen=True)
class FutureDependencies(Dependencies):
    """What futures may be given: the same, and what the reward is made of."""

    metrics: Mapping[str, Metric] = field(default_factory=dict)
    """The reward's."""
    weights: Mapping[str, MetricWeight] = field(default_factory=dict)
    user: Participant | None = None
    """The simulated user, if there is one."""
    credit: CreditConfig | None = None
    """How tokens earn the main reward; None: the whole reply does."""
    renderer: Renderer | None = None
    """Of the policy; None: it is asked with messages, and its ids cannot be read."""
    seed: int = 0
    """The run's."""
    with_user: bool = False
    """Whether the user took part in the episode; once it has left, nothing is continued."""

    def for_futures(self) -> dict[str, Any]:
        """Keyword arguments for the registry of futures."""
        return {name: getattr(self, name) for name in FUTURE_NAMES if name != "dependencies"} | {"dependencies": self}


FUTURE_NAMES = (*(one.name for one in fields(FutureDependencies)), "dependencies")
"""What futures may name."""
