"""What can be known to be wrong before a run begins: one file a check, each saying what it found.

`upshot train --dry-run` prints the findings; a run makes the same checks before it loads anything slow. Nothing is
written. It does not look at what only training shows: whether the weights load, whether a metric's own code works.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from upshot.config.recipe import Recipe
from upshot.core.errors import UserError
from upshot.rollout.check_names import check_names
from upshot.run.checks import data, output, trackers
from upshot.run.checks.context import Check, CheckContext, Finding
from upshot.training.metrics.best import check_evaluations

CHEAP: Sequence[Check] = (output.check, trackers.check, data.check)
"""Those that need no PyTorch."""


def find(recipe: Recipe, offline: bool = False, resumed: bool = False, ranks: int = 1) -> list[Finding]:
    """Everything that is wrong, or worth knowing, about a recipe; `offline` calls no endpoint and asks no hub.

    A wrong name is reported alone, as nothing else can be checked then. Without data only the cheap checks are made:
    the others take seconds to load what they look at.
    """
    try:
        check_names(recipe)
        check_evaluations(recipe)
    except UserError as error:
        return [Finding(str(error))]
    context = CheckContext(recipe, offline, resumed, ranks)
    cheap = {check: list(run_check(check, context)) for check in CHEAP}
    findings = list(chain.from_iterable(cheap.values()))
    if not any(finding.fatal for finding in cheap[data.check]):
        findings += [finding for check in _thorough() for finding in run_check(check, context)]
    return list(dict.fromkeys(findings))  # what several checks find is reported once


def _thorough() -> Sequence[Check]:
    """The checks that need PyTorch, the tokenizer or the helpers; one dry run tells everything that they find."""
    from upshot.run.checks import helpers, learning, memory, model, prompts, vllm

    return (model.check, learning.check, prompts.check, helpers.check, vllm.check, memory.check)


def refuse(findings: Sequence[Finding]) -> None:
    """Raise everything that must be fixed."""
    wrong = [finding.says for finding in findings if finding.fatal]
    if wrong:
        raise UserError(wrong[0] if len(wrong) == 1 else f"{len(wrong)} things to fix: " + "; ".join(wrong))


def run_check(check: Check, context: CheckContext) -> Iterator[Finding]:
    """What a check finds; a `UserError` that it lets pass is a finding, too."""
    try:
        yield from check(context)
    except UserError as error:
        yield Finding(str(error))
