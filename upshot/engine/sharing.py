"""Which rows of a step share their first pages."""

from __future__ import annotations

import numpy as np

from upshot.engine.sequence import Sequence

MIN_SHARERS = 4
"""Fewer rows read a shared prefix each for themselves."""
MIN_SHARED_PAGES = 4


def find_shared(
    rows: list[Sequence], page_size: int, most: int, skip: int = 0, least: int = MIN_SHARERS
) -> tuple[list[tuple[int, int, list[int]]], np.ndarray]:
    """Groups (leader, prefix length, rows) of at most `most` rows with the same first pages; each row's own start.

    `skip`: so many first pages are known to be the same and do not count. `least`: rows that make a group.
    """
    starts = np.zeros(len(rows), dtype=np.int32)
    families: dict[int, list[int]] = {}
    for index, seq in enumerate(rows):
        if skip < len(seq.pages):
            families.setdefault(seq.pages[skip], []).append(index)
    groups: list[tuple[int, int, list[int]]] = []
    for members in families.values():
        if len(members) < least:
            continue
        common = min(len(rows[i].pages) for i in members) - 1
        first = rows[members[0]].pages
        for i in members[1:]:
            pages = rows[i].pages
            while common and pages[:common] != first[:common]:
                # Halve until equal, then grow: a handful of slice comparisons instead of one a page.
                low, high = 0, common
                while low < high:
                    middle = (low + high + 1) // 2
                    low, high = (middle, high) if pages[:middle] == first[:middle] else (low, middle - 1)
                common = low
        if common - skip < MIN_SHARED_PAGES:
            continue
        for at in range(0, len(members), most):
            part = members[at : at + most]
            groups.append((part[0], common * page_size, part))
            starts[part] = common * page_size
    return groups, starts
