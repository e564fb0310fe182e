"""Prompts that do not fit into the model's context, and dialogues that are cut there."""

from __future__ import annotations

from collections.abc import Iterator

from upshot.config.method import method_of
from upshot.core.conversation import Row
from upshot.rollout.prompt_length import describe_long, find_long
from upshot.run.checks.context import CheckContext, Finding

DONE = {"filter": "left out", "truncate": "cut at their beginning"}


def check(context: CheckContext) -> Iterator[Finding]:
    """Count them; what `episode.long_prompts` does with them is worth knowing, its default refuses them."""
    if not context.model_here:
        return  # its tokenizer is at the hub
    yield from _openings(context) if context.sampled else _dialogues(context)


def _openings(context: CheckContext) -> Iterator[Finding]:
    evaluated, rule = context.recipe.eval, context.recipe.episode.long_prompts
    for split, most in (("train", None), (evaluated.split, evaluated.rows if evaluated.every else 0)):
        rows = context.task.rows(split)[:most] if most != 0 else []
        long = find_long(rows, context.prompt_filter)
        if long and (rule == "error" or len(long) == len(rows)):
            yield Finding(describe_long(long, len(rows), context.prompt_filter))
        elif long:
            yield Finding(f"{len(long)} of {len(rows)} prompts ({split}) do not fit and are {DONE[rule]}", False)


def _dialogues(context: CheckContext) -> Iterator[Finding]:
    config, lengths = context.recipe.train, context.prompt_filter
    method = method_of(config.method)
    if not method.imitates or not lengths.context:
        return
    talks = method.examples(config, context.task)
    long = [talk for talk in talks if not lengths.fits(Row("", tuple(talk)))]
    if long:
        from upshot.training.loops.sft import Dialogues

        lost = len(long) - len(Dialogues(long, context.renderer, lengths.context, lengths.tools))
        says = f"{len(long)} of {len(talks)} dialogues are longer than the model's {lengths.context} tokens"
        more = f"; {lost} of them, whose assistant speaks only after that, are left out" if lost else ""
        yield Finding(f"{says} and are cut there{more}; or raise model.max_context", lost == len(talks))
