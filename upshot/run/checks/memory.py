"""Whether the run fits into the memory of the policy's device."""

from __future__ import annotations

from collections.abc import Iterator

from upshot.run.checks.context import CheckContext, Finding
from upshot.training.learner.memory.fit import plan_recipe


def check(context: CheckContext) -> Iterator[Finding]:
    """Make the memory plan; what cannot fit is its `UserError`. On the CPU nothing is limited."""
    plan_recipe(context.recipe, len(context.task.vocabulary() or ()), context.ranks)
    yield from ()
