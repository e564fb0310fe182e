"""Checks that credit covers every sampled token exactly once."""

from __future__ import annotations

from collections.abc import Sequence

from upshot.rewards.credit import Credit


def check(credit: Credit, mask: Sequence[int]) -> None:
    """Every sampled token is in exactly one span, no other token in any."""
    covered = [0] * len(mask)
    for span in credit.spans:
        for position in range(span.start, span.stop):
            covered[position] += 1
    if covered != [1 if bit else 0 for bit in mask]:
        raise ValueError("credit spans must cover every sampled token once and no other token")
