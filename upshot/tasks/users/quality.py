"""How well a simulated user plays its part: pure measures of one message.

They are heuristics with known blind spots, made to be counted over many conversations, not to judge one: a role flip
that uses none of the phrases below is not seen, nor is a goal retold in other words.
"""

from __future__ import annotations

import re
from pathlib import Path

import yaml

_WORD = re.compile(r"\w+", re.UNICODE)
_TABLE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
_ASSISTANT_PHRASES = re.compile("|".join(_TABLE["phrases"]), re.IGNORECASE)
_HINTS = {*_TABLE["hints"].split()}
"""Every phrase holds one of these: a message without any needs no closer look, and most have none."""
NO_ANSWER = {"", "none", "n/a", "null", "unknown", "nothing", "nothing yet"}
ECHO_SHARE = 0.6
"""Share of the assistant's last message that makes a user's message its echo."""


def words(text: str) -> list[str]:
    """The words of a text, lower case, without punctuation."""
    return _WORD.findall(text.lower())


def overlap(source: str, text: str, n: int = 6) -> float:
    """The share of the source's word n-grams that the text repeats: 1.0 is a copy, 0.0 shares none.

    A source shorter than n words counts as one n-gram; one of fewer than three words cannot be called copied.
    """
    return _share(words(source), words(text), n)


def copied_share(goal: str, message: str, n: int = 6) -> float:
    """How far a message is a copy of the goal: the share of the goal that it repeats, or, in a message of two n-grams
    and more, the share of the message that comes from the goal word by word (a paragraph of a long goal)."""
    spoken = words(message)
    if len(spoken) < 3:
        return 0.0
    wanted = words(goal)
    share = _share(wanted, spoken, n)
    return max(share, _share(spoken, wanted, n)) if len(spoken) >= 2 * n else share


def _share(source: list[str], text: list[str], n: int) -> float:
    n = min(n, len(source))
    if n < 3 or len(text) < n:
        return 0.0
    grams = {tuple(text[i : i + n]) for i in range(len(text) - n + 1)}
    wanted = [tuple(source[i : i + n]) for i in range(len(source) - n + 1)]
    return sum(gram in grams for gram in wanted) / len(wanted)


def is_role_flip(message: str, assistant: str = "") -> bool:
    """Whether a user's message reads like an assistant's: its set phrases, or an echo of what it just said."""
    if not _HINTS.isdisjoint(words(message)) and _ASSISTANT_PHRASES.search(message):
        return True
    return len(assistant) >= 60 and overlap(assistant, message) >= ECHO_SHARE


def is_early_end(assistant_spoke: bool, current_answer: str) -> bool:
    """Whether a user left before it had anything: the assistant said nothing yet, or there is no answer so far."""
    return not assistant_spoke or current_answer.strip().strip(".").lower() in NO_ANSWER
