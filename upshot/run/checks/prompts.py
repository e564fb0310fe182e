"""Prompts that do not fit into the model's context, and dialogues that are cut there."""

from __future__ import annotations

from collections.abc import Iterator

from upshot.core.conversation import Row
from upshot.rollout.prompt_length import tell, too_long
from upshot.run.checks.bench import CheckContext, Finding
from upshot.tasks.datasets.records import read_dialogues

DONE = {"filter": "left out", "truncate": "cut at their beginning"}


def check(bench: CheckContext) -> Iterator[Finding]:
    """Count them; what `episode.long_prompts` does with them is worth knowing, its default refuses them."""
    if not bench.model_here:
        return  # its tokenizer is at the hub
    yield from _openings(bench) if bench.sampled else _dialogues(bench)


def _openings(bench: CheckContext) -> Iterator[Finding]:
    evaluated = bench.recipe.eval
    rule = bench.recipe.episode.long_prompts
    for split, most in (("train", None), (evaluated.split, evaluated.rows if evaluated.every else 0)):
        rows = bench.rows(split)[:most] if most != 0 else []
        long = too_long(rows, bench.room)
        if long and (rule == "error" or len(long) == len(rows)):
            yield Finding(tell(long, len(rows), bench.room))
        elif long:
            yield Finding(f"{len(long)} of {len(rows)} prompts ({split}) do not fit and are {DONE[rule]}", False)


def _dialogues(bench: CheckContext) -> Iterator[Finding]:
    config, room = bench.recipe.train, bench.room
    if config.method != "sft" or not room.context:
        return
    talks = read_dialogues(config.data) if config.data else bench.task.dialogues("train")
    long = too_long([Row(str(number), tuple(talk)) for number, talk in enumerate(talks)], room)
    if long:
        says = (
            f"{len(long)} of {len(talks)} dialogues are longer than the model's {room.context} tokens and are cut there"
        )
        yield Finding(says, False)
