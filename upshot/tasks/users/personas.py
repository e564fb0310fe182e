"""Who the simulated user is and how little it says: what keeps a simulator from being too cooperative."""

from __future__ import annotations

import random
from collections.abc import Sequence

from upshot.core.conversation import Row, derive_seed
from upshot.core.errors import UserError, did_you_mean

PERSONAS: dict[str, str] = {
    "plain": "You are an ordinary person with something to get done. You write short, everyday sentences.",
    "hurried": "You are between two meetings and type on a phone. You write fragments, skip greetings and "
    "punctuation, and lose patience with long answers.",
    "novice": "You know little about the subject. You mix up terms, do not always follow explanations, and say so.",
    "expert": "You know the subject well and have strong preferences. You are blunt when something is wrong.",
    "rambling": "You think while you type. You mention things that do not matter and sometimes correct what you "
    "said before.",
    "doubtful": "You do not trust the first answer. You ask why, and sometimes you doubt things that are right.",
    "careless": "You misremember details now and then and make typing mistakes. When asked directly you look again "
    "and put it right.",
}
"""Built-in personas by name."""

VAGUENESS: dict[str, str] = {
    "low": "Say what you need in your first message, in your own words. Add details when they matter.",
    "medium": "Begin with the gist in one or two sentences. Give a further detail only when it comes up, at most two "
    "in a message.",
    "high": "Begin with one short, vague sentence that names little more than the subject. Never volunteer a detail: "
    "give one only when you are asked for just that, one in a message.",
}
"""How much the user tells by itself."""

MIXED = "mixed"


def check_persona(persona: str | Sequence[str]) -> None:
    """Raise when a one-word persona is neither known nor 'mixed'; a sentence describes a persona of your own."""
    for name in [persona] if isinstance(persona, str) else persona:
        if name and " " not in name and name != MIXED and name not in PERSONAS:
            raise UserError(
                f"unknown persona '{name}'; {did_you_mean(name, [*PERSONAS, MIXED])} (your own: describe it in words)"
            )


def choose_persona(persona: str | Sequence[str], row: Row, seed: int = 0) -> tuple[str, str]:
    """Name and description of the persona a row's user has.

    It is drawn by the row, not by the fork: all replies of a group and all their futures meet the same person, so
    their rewards can be compared. A row's own `meta['persona']` comes first.
    """
    chosen = row.meta.get("persona") or persona
    if chosen == MIXED:
        chosen = sorted(PERSONAS)
    if not isinstance(chosen, str):
        chosen = random.Random(derive_seed(seed, "persona", row.id)).choice(list(chosen))
    return (chosen, PERSONAS[chosen]) if chosen in PERSONAS else ("own", chosen)
