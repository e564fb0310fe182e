"""Counts what conversations look like and what correlates with their outcome, in one pass; needs no model.

A sign is an event that can be read from a conversation: the assistant asks, repeats itself, is corrected, is abandoned.
"""

from __future__ import annotations

import heapq
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from statistics import NormalDist
from typing import Any

from upshot.offline.logs.read import NAMES, LoggedConversation
from upshot.offline.statistics import LEVEL, Estimate, wilson
from upshot.tasks.users import quality

words = lru_cache(64)(quality.words)
"""The words of a text, cached: each message is split up to three times."""
KINDS, OTHERS = 50, "(other kinds)"
"""How many kinds of conversations are told apart, and the name of the rest."""
TELLING = 10
"""How many of the worst and of the best conversations to keep."""
_CORRECTION = re.compile(
    r"\b(no,? i (meant|said|want|asked)|i (meant|already (said|told))|that'?s (not (what|right)|wrong)"
    r"|not what i (asked|meant)|you (misunderstood|did ?n[o']t (answer|understand)))|what do you mean\b",
    re.IGNORECASE,
)
_LANGUAGES: dict[str, list[str]] = {name: common.split() for name, common in NAMES["languages"].items()}
_COMMON = {
    word: [name for name, common in _LANGUAGES.items() if word in common]
    for word in chain.from_iterable(_LANGUAGES.values())
}
"""The languages in which a word is common."""


def asks(talk: LoggedConversation) -> bool:
    """The assistant asks something."""
    return any("?" in message.content for message in talk.messages if message.role == "assistant")


def repeats(talk: LoggedConversation) -> bool:
    """The assistant says the same words twice."""
    replies = [" ".join(words(message.content)) for message in talk.messages if message.role == "assistant"]
    return len(set(replies)) < len(replies)


def corrected(talk: LoggedConversation) -> bool:
    """The user corrects the assistant, or does not understand it."""
    return any(_CORRECTION.search(message.content) for message in talk.messages[1:] if message.role == "user")


def abandoned(talk: LoggedConversation) -> bool:
    """The conversation ends with a question of the assistant that nobody answers."""
    return talk.messages[-1].role == "assistant" and "?" in talk.messages[-1].content


def uses_tools(talk: LoggedConversation) -> bool:
    """A tool answers the assistant."""
    return any(message.name == "tool" for message in talk.messages)


SIGNS: dict[str, Callable[[LoggedConversation], bool]] = {
    "asks": asks,
    "repeats itself": repeats,
    "is corrected": corrected,
    "is abandoned": abandoned,
    "uses tools": uses_tools,
}


def language(talk: LoggedConversation) -> str:
    """The language of the user's words, by script and by common words; 'Other' if neither decides."""
    texts = [message.content for message in talk.messages if message.role == "user" and not message.name]
    scripts: Counter[str] = Counter()
    for char, count in Counter("".join(texts)).items():  # a few dozen different characters instead of the whole text
        if char.isalpha():
            scripts["LATIN" if char.isascii() else unicodedata.name(char, "other").split()[0]] += count
    script = scripts.most_common(1)[0][0] if scripts else "other"
    if script != "LATIN":
        return script.capitalize()
    hits: Counter[str] = Counter()
    for name in chain.from_iterable(_COMMON.get(word, ()) for text in texts for word in words(text)):
        hits[name] += 1
    best = max(_LANGUAGES, key=hits.__getitem__)
    return best if hits[best] else "Other"


@dataclass
class Mean:
    """A running mean with its interval: Wilson's for zeros and ones, else the normal one.

    An interval of shares stays between 0 and 1, and one of counts is not negative.
    """

    n: int = 0
    total: float = 0.0
    squares: float = 0.0
    lowest: float = math.inf
    highest: float = -math.inf
    binary: bool = True
    """Whether all values are 0 or 1."""

    def add(self, value: float) -> None:
        """One more value."""
        self.n, self.total, self.squares = self.n + 1, self.total + value, self.squares + value * value
        self.lowest, self.highest = min(self.lowest, value), max(self.highest, value)
        self.binary = self.binary and value in (0, 1)

    def estimate(self, binary: bool = True) -> Estimate | None:
        """The mean and its interval; None without values. binary: whether values of this kind are all 0 or 1."""
        if not self.n:
            return None
        if self.binary and binary:
            return wilson(round(self.total), self.n)
        mean = self.total / self.n
        spread = max(self.squares / self.n - mean * mean, 0.0) / max(self.n - 1, 1)
        half = NormalDist().inv_cdf((1 + LEVEL) / 2) * spread**0.5
        return Estimate(mean, max(mean - half, min(self.lowest, 0.0)), min(mean + half, max(self.highest, 1.0)), self.n)

    def to_dict(self, binary: bool = True) -> dict[str, float]:
        """Mean and interval for reports; {} without values."""
        estimate = self.estimate(binary)
        return {} if estimate is None else estimate.to_dict()


class Survey:
    """Statistics of all conversations so far, in bounded memory."""

    def __init__(self) -> None:
        self.conversations = 0
        self.outcome = Mean()
        self.turns, self.words = Mean(), {"user": Mean(), "assistant": Mean()}
        self.languages: Counter[str] = Counter()
        self.kinds: dict[str, Mean] = {}
        self.signs = {name: (Mean(), Mean()) for name in SIGNS}
        """Outcomes with and without each sign."""
        self.shares = {name: Mean() for name in SIGNS}
        self._worst: list[tuple[Any, ...]] = []
        self._best: list[tuple[Any, ...]] = []

    def add(self, talk: LoggedConversation) -> None:
        """Count one conversation."""
        self.conversations += 1
        self.turns.add(len(talk.messages))
        for message in talk.messages:
            if not message.name:
                self.words[message.role].add(len(words(message.content)))
        self.languages[language(talk)] += 1
        present = {name: sign(talk) for name, sign in SIGNS.items()}
        for name, shows in present.items():
            self.shares[name].add(float(shows))
        bad = sum(present.values()) - present["asks"] - present["uses tools"]
        if talk.outcome is not None:
            self.outcome.add(talk.outcome)
            kind = talk.kind if talk.kind in self.kinds or len(self.kinds) < KINDS else OTHERS
            self.kinds.setdefault(kind, Mean()).add(talk.outcome)
            for name, shows in present.items():
                self.signs[name][not shows].add(talk.outcome)
        # Ties are broken by the count, so that conversations are never compared.
        worst = (-(talk.outcome or 0.0), bad, -self.conversations, talk)
        best = (talk.outcome or 0.0, bad, -self.conversations, talk)
        for heap, item in ((self._worst, worst), (self._best, best)) if talk.outcome is not None or bad else ():
            (heapq.heappush if len(heap) < TELLING else heapq.heappushpop)(heap, item)

    def telling(self) -> list[LoggedConversation]:
        """The worst conversations, then the best ones, each ordered by the number of bad signs."""
        chosen = [*sorted(self._worst, reverse=True), *sorted(self._best, reverse=True)]
        return list({item[3].place: item[3] for item in chosen}.values())

    def to_dict(self) -> Mapping[str, Any]:
        """The survey as JSON data."""
        binary = self.outcome.binary  # of a rating from 1 to 5, some groups may have ones only
        return {
            "conversations": self.conversations,
            "outcome": self.outcome.to_dict(),
            "sizes": {
                "turns": self.turns.to_dict(binary=False),
                "words of a user's turn": self.words["user"].to_dict(binary=False),
                "words of an assistant's turn": self.words["assistant"].to_dict(binary=False),
            },
            "languages": dict(self.languages.most_common()),
            "kinds": {name: mean.to_dict(binary) for name, mean in self.kinds.items()},
            "signs": {
                name: {"share": self.shares[name].to_dict(), "with": yes.to_dict(binary), "without": no.to_dict(binary)}
                for name, (yes, no) in self.signs.items()
            },
        }
