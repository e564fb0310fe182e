"""Splits rows so that train, validation and test never share a goal. Pure functions.

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
    """A text without case and spacing, so that different spellings of a goal count as one."""
    return " ".join(text.split()).casefold()


def fingerprint(text: str) -> str:
    """A short stable name for a goal."""
    return hashlib.blake2b(plain(text).encode(), digest_size=6).hexdigest()


def goal_key(row: Row) -> str:
    """The key that keeps rows in the same split: the goal, else the opening, else (if a server opens) the row's id."""
    return plain(str(row.goal)) if row.goal else plain("\n".join(m.content for m in row.messages)) or row.id


def hold_out(goals: Iterable[str], share: float, seed: int = 0) -> set[str]:
    """The goals to hold out: about `share` of them (from 1 on, a number), at least one of two or more, never all."""
    distinct = set(goals)
    if share <= 0 or not distinct:
        return set()
    if 1 <= share >= len(distinct):
        raise UserError(f"{share:g} goals cannot be held out of {len(distinct)}; hold out fewer, or a share below 1")
    count = int(share) if share >= 1 else min(max(1, round(len(distinct) * share)), len(distinct) - 1)
    return set(sorted(distinct, key=lambda goal: (derive_seed(seed, "split", goal), goal))[:count])


def split_in_three(tables: Mapping[str, Sequence[Row]], share: float, seed: int = 0) -> dict[str, list[Row]]:
    """Rows by split for a task; goals of test or validation are removed from train.

    If a source has only train, `share` of its goals is held out for each of test and validation.
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
    """(train, validation, number removed from train) for a file to be written: the source's own split, if it has one.

    What train then shares with validation is removed from it; of a source without a split, `share` of the goals is held
    out. `keys` returns a key for each of the items; items with the same key stay together.
    """
    train = list(tables.get("train", ()))
    validation = [item for split, items in tables.items() if split != "train" for item in items]
    both = [*train, *validation]
    keyed = list(zip(both, keys(both), strict=True))
    if train and validation:
        taken = {key for _, key in keyed[len(train) :]}
        kept = [item for item, key in keyed if key not in taken]
        return kept, validation, len(train) - len(kept)
    taken = hold_out((key for _, key in keyed), share, seed)
    return [item for item, key in keyed if key not in taken], [item for item, key in keyed if key in taken], 0
