"""Openings that leave the policy no room to reply: counted, left out or cut, as `episode.long_prompts` says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from upshot.config.recipe import Recipe
from upshot.core.conversation import Conversation, Row, Tools
from upshot.core.errors import UserError
from upshot.models.rendering import Renderer
from upshot.rollout.episode import with_system_prompt
from upshot.tasks.base import Task

SLACK = 8
"""Tokens that a message may gain by standing in a template instead of alone: blanks, a split at its edge."""


@dataclass(frozen=True)
class PromptLengthFilter:
    """How much a policy can take in, and what is put before every opening."""

    renderer: Renderer
    context: int
    """Most tokens of prompt and reply together; 0: no limit."""
    reply: int
    """Tokens of one reply."""
    system: str = ""
    tools: Tools = ()
    _frames: dict[tuple[str, ...], int] = field(default_factory=dict)

    def fits(self, row: Row) -> bool:
        """Whether a reply of at least one token fits behind the opening; True where the user has yet to open."""
        if not self.context or not any(message.role == "user" for message in row.messages):
            return True
        most = sum(len(message.content.encode("utf-8", "replace")) + SLACK for message in row.messages)
        # Tokens that are not the row's own words: template, system prompt, tools.
        roles = tuple(message.role for message in row.messages)
        if roles not in self._frames or any(message.tool_calls for message in row.messages):
            empty = tuple(replace(message, content="?") for message in row.messages)
            self._frames[roles] = self._length(replace(row, messages=empty))
        if most + self._frames[roles] < self.context:
            return True  # a token spells a byte at least, so most rows need no tokenizer
        return self._length(row) < self.context

    def cut(self, row: Row) -> Row | None:
        """The row with the beginning of its longest message left out, so that a whole reply fits; None: it cannot."""
        most = self.context - min(self.reply, self.context // 2)
        spoken = [place for place, message in enumerate(row.messages) if message.role != "system"]
        place = max(spoken, key=lambda at: len(row.messages[at].content))
        ids = self.renderer.encode_words(row.messages[place].content)
        while ids:
            over = self._length(row) - most
            if over <= 0:
                return row
            ids = ids[over:]
            text = self.renderer.decode(ids).lstrip("\ufffd")
            message = replace(row.messages[place], content=text)
            row = replace(row, messages=(*row.messages[:place], message, *row.messages[place + 1 :]))
        return None

    def _length(self, row: Row) -> int:
        return len(self.renderer.context(with_system_prompt(Conversation(row), self.system), self.tools))


def build_prompt_filter(recipe: Recipe, task: Task, renderer: Renderer, context: int) -> PromptLengthFilter:
    """The filter of a recipe's policy; `context`: the most tokens that it can take in, 0 for no limit."""
    episode = recipe.episode
    return PromptLengthFilter(renderer, context, episode.max_tokens, episode.system, task.tools())


def find_long(rows: Sequence[Row], lengths: PromptLengthFilter) -> list[str]:
    """Ids of the rows whose opening leaves no room for a reply."""
    return [row.id for row in rows if not lengths.fits(row)]


def filter_rows(rows: Sequence[Row], lengths: PromptLengthFilter, rule: str) -> Sequence[Row]:
    """The rows that can be replied to: all of them, or those that the rule ('filter', 'truncate') leaves."""
    if all(map(lengths.fits, rows)):
        return rows
    if rule == "error":
        raise UserError(describe_long(find_long(rows, lengths), len(rows), lengths))
    if rule == "filter":
        return [row for row in rows if lengths.fits(row)]
    cut = (row if lengths.fits(row) else lengths.cut(row) for row in rows)
    return [row for row in cut if row is not None]


def describe_long(long: Sequence[str], rows: int, lengths: PromptLengthFilter) -> str:
    """How many rows do not fit, and what can be done."""
    return (
        f"{len(long)} of {rows} prompts leave no room for a reply in the model's {lengths.context} tokens (such as row "
        f"'{long[0]}'); set episode.long_prompts=filter (leave them out) or truncate (cut their beginning)"
    )
