"""Train, validation and test never share a goal: which goals are one, and which of them are held out. Pure functions.

Splits are by goal, never by row. Which goals are held out depends on the seed and the goals alone, not on the order or
the number of rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from upshot.core.conversation import Row, derive_seed
from upshot.core.errors import UserError

T = TypeVar("T")


def plain(text: str) -> str:
    """A text with case and spacing taken away, so that two spellings of one goal are one goal."""
    return " ".join(text.split()).casefold()


def fingerprint(text: str) -> str:
    """A short stable name for a goal."""
    return hashlib.blake2b(plain(text).encode(), digest_size=6).hexdigest()


def goal_key(row: Row) -> str:
    """By what rows are held together in a split: the goal, else the opening, else (a server opens) the row itself."""
    return plain(str(row.goal)) if row.goal else plain("\n".join(m.content for m in row.messages)) or row.id


def hold_out(goals: Iterable[str], share: float, seed: int = 0) -> set[str]:
    """The goals to hold out: about `share` of them (1 and above is a count), at least one of two or more, never all."""
    distinct = set(goals)
    if share <= 0 or not distinct:
        return set()
    if 1 <= share >= len(distinct):
        raise UserError(f"{share:g} goals cannot be held out of {len(distinct)}; hold out fewer, or a share below 1")
    count = int(share) if share >= 1 else min(max(1, round(len(distinct) * share)), len(distinct) - 1)
    return set(sorted(distinct, key=lambda goal: (derive_seed(seed, "split", goal), goal))[:count])


def split_in_three(tables: Mapping[str, Sequence[Row]], share: float, seed: int = 0) -> dict[str, list[Row]]:
    """Rows by split for a task: a goal of test or validation leaves train.

    A source that is all train has `share` of its goals held out for each of test and validation.
    """
    splits: dict[str, list[Row]] = {}
    taken: set[str] = set()
    for split in ("test", "validation", "train"):
        splits[split] = [row for row in tables.get(split, ()) if goal_key(row) not in taken]
        taken |= {goal_key(row) for row in splits[split]}
    if not splits["test"] and not splits["validation"]:
        for number, split in enumerate(("test", "validation")):
            goals = hold_out(map(goal_key, splits["train"]), share, seed + number)
            splits[split] = [row for row in splits["train"] if goal_key(row) in goals]
            splits["train"] = [row for row in splits["train"] if goal_key(row) not in goals]
    return {split: rows for split, rows in splits.items() if rows}


def split_in_two(
    tables: Mapping[str, Sequence[T]], keys: Callable[[Sequence[T]], Sequence[str]], share: float, seed: int = 0
) -> tuple[list[T], list[T], int]:
    """(train, validation, how many left train) for a file to be written: the source's own split where it has one.

    What train then shares with validation leaves it; a source without a split has `share` of its goals held out. `keys`
    says by what the things are held together, one key beside each.
    """
    train = list(tables.get("train", ()))
    validation = [thing for split, things in tables.items() if split != "train" for thing in things]
    both = [*train, *validation]
    beside = list(zip(both, keys(both), strict=True))
    if train and validation:
        taken = {key for _, key in beside[len(train) :]}
        kept = [thing for thing, key in beside if key not in taken]
        return kept, validation, len(train) - len(kept)
    taken = hold_out((key for _, key in beside), share, seed)
    return [thing for thing, key in beside if key not in taken], [thing for thing, key in beside if key in taken], 0
