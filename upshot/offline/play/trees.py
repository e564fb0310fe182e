"""Replies and their futures as trees on a terminal. Control characters in what models said are removed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from upshot.core.conversation import Turn
from upshot.core.html import short
from upshot.core.score import Score
from upshot.rollout.reply import Rollout

STYLES = {"assistant": "cyan", "user": "green", "system": "dim", "tool": "magenta"}
LONGEST = 1200
"""How many characters of a turn to show; of a longer one, the beginning and the end."""


def clean(text: str) -> str:
    """A text without control characters: a model's words must not move the cursor or colour the screen."""
    return "".join(c for c in text if c in "\n\t" or (c.isprintable() and c not in "\u202e\u202d\u2066\u2067\u2068"))


def cut(text: str, most: int = LONGEST) -> str:
    """A long text with its middle left out."""
    return text if len(text) <= most else f"{text[: most // 2]} […] {text[-most // 2 :]}"


def turn_line(role: str, text: str, style: str = "") -> Any:
    """One message with its speaker, for rich."""
    from rich.text import Text

    words = cut(clean(text)).strip() or "(nothing)"
    return Text.assemble((f"{role}: ", f"bold {STYLES.get(role, '')}".strip()), (words, style))


def tell_score(score: Score) -> str:
    """A score's value, or why it is missing."""
    if score.value is not None:
        return short(score.value)
    return f"missing ({score.reason}{f': {score.why}' if score.why else ''})"


def tell_scores(scores: Mapping[str, Score]) -> str:
    """All scores of a conversation in a line."""
    return "  ".join(f"{name} {tell_score(score)}" for name, score in scores.items())


def group_tree(replies: Sequence[Rollout], title: str, think: bool = True) -> Any:
    """A prompt, and the replies to it with their futures and rewards."""
    from rich.text import Text
    from rich.tree import Tree

    first = replies[0].conversation
    tree = Tree(Text(title, "bold"))
    for name, fact in (("goal", first.row.goal), ("reference", first.row.reference)):
        if fact is not None:
            tree.add(turn_line(name, cut(str(fact), 300), "dim"))
    for turn in first.turns[: _opening_length(replies[0])]:
        tree.add(turn_line(turn.message.role, turn.message.content))
    for number, reply in enumerate(replies, 1):
        _add_reply(tree, reply, number, think)
    return tree


def _opening_length(reply: Rollout) -> int:
    """The number of turns before the reply, which begins with the policy's first turn that is not in the row."""
    turns, before = reply.conversation.turns, len(reply.conversation.row.messages)
    spoken = (place for place, turn in enumerate(turns) if place >= before and turn.message.role == "assistant")
    return next(spoken, len(turns))


def _add_reply(tree: Any, reply: Rollout, number: int, think: bool) -> None:
    from rich.text import Text

    reward, means = f"  reward {tell_score(reply.reward.total)}", "  " + tell_scores(reply.reward.means)
    branch = tree.add(Text.assemble((f"reply {number}", "bold"), reward, (means, "dim")))
    _add_turns(branch, reply.conversation.turns[_opening_length(reply) :], think)
    if len(reply.futures) > 1 or any(future.by for future in reply.futures):
        for place, future in enumerate(reply.futures, 1):
            by = f" by {future.by}" if future.by not in ("", "user") else ""
            title = Text.assemble((f"future {place}{by}", "bold"), ("  " + tell_scores(future.scores), "dim"))
            _add_turns(branch.add(title), future.conversation.turns[future.shared :])


def _add_turns(branch: Any, turns: Iterable[Turn], think: bool = False) -> None:
    for turn in turns:
        if think and turn.note.get("thought"):
            branch.add(turn_line("thought", str(turn.note["thought"]), "italic dim"))
        branch.add(turn_line(turn.message.role, turn.message.content))
