"""Whether the run fits into the memory of the policy's device."""

from __future__ import annotations

from collections.abc import Iterator

from upshot.run.checks.bench import CheckContext, Finding
from upshot.training.learner.memory.fit import plan_recipe


def check(bench: CheckContext) -> Iterator[Finding]:
    """Make the memory plan; what cannot fit is its `UserError`. On the CPU nothing is limited."""
    plan_recipe(bench.recipe, len(bench.task.vocabulary() or ()), bench.ranks)
    yield from ()
