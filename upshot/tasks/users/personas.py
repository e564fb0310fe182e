"""Who the simulated user is and how little it says: what keeps a simulator from being too cooperative."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import yaml

from upshot.core.conversation import Row, derive_seed
from upshot.core.errors import UserError, did_you_mean

_TABLE = yaml.safe_load((Path(__file__).parent / "personas.yaml").read_text("utf-8"))
PERSONAS: dict[str, str] = _TABLE["personas"]
"""Built-in personas by name."""
VAGUENESS: dict[str, str] = _TABLE["vagueness"]
"""How much the user says without being asked."""
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
