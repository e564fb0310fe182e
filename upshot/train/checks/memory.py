"""Whether the run fits into the machine's memory."""

from __future__ import annotations

from collections.abc import Iterator

from upshot.recipe import Recipe
from upshot.train.checks.bench import Bench, Finding


def check(bench: Bench) -> Iterator[Finding]:
    """What the memory plan says of the recipe."""
    yield from (Finding(says) for says in memory(bench.recipe))


def memory(recipe: Recipe) -> list[str]:
    """Sentences of what does not fit; none are known before there is a plan of the memory."""
    return []
