"""What makes two goals one goal, and which goals are held out. Pure functions."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from upshot.core.conversation import derive_seed
from upshot.core.errors import UserError


def plain(text: str) -> str:
    """A text with case and spacing taken away, so that two spellings of one goal are one goal."""
    return " ".join(text.split()).casefold()


def fingerprint(text: str) -> str:
    """A short stable name for a goal."""
    return hashlib.blake2b(plain(text).encode(), digest_size=6).hexdigest()


def held_out(goals: Iterable[str], share: float, seed: int = 0) -> set[str]:
    """The goals to hold out: about `share` of them (from 1 on: so many), at least one where there are two, never all.

    Which ones depends on the seed and the goals alone, not on the order or the number of rows.
    """
    distinct = set(goals)
    if share <= 0 or len(distinct) < 2:
        return set()
    if share >= len(distinct):
        raise UserError(f"{share:g} goals cannot be held out of {len(distinct)}; give fewer, or a share below 1")
    count = int(share) if share >= 1 else min(max(1, round(len(distinct) * share)), len(distinct) - 1)
    return set(sorted(distinct, key=lambda goal: (derive_seed(seed, "split", goal), goal))[:count])
