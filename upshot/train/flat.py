"""Groups whose replies all earned the same teach nothing: telling them, and playing other rows in their place."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from upshot.chat import Row
from upshot.rollout.reply import Reply

Group = list[Reply]
SAME = 1e-9
"""Rewards closer than this are alike."""


def is_flat(group: Sequence[Reply]) -> bool:
    """Whether no part of the reward tells the group's replies apart."""
    parts: dict[str, list[float]] = {}
    for reply in group:
        for name, score in reply.credit.parts.items() if reply.credit is not None else ():
            if score.value is not None:
                parts.setdefault(name, []).append(score.value)
    return all(max(values) - min(values) < SAME for values in parts.values())


async def play_until_varied(
    play: Callable[[Sequence[Row], int], Awaitable[list[Group]]],
    more: Callable[[int, int], Sequence[Row]],
    first: Sequence[Row],
    rounds: int,
) -> list[Group]:
    """Play rows, and for groups that came out flat other ones, at most `rounds` times; as many groups as first rows.

    `play(rows, round)` plays a round, `more(count, round)` chooses its rows. Where rounds do not suffice, flat groups
    fill up.
    """
    varied: list[Group] = []
    flat: list[Group] = []
    rows = first
    for number in range(rounds + 1):
        for group in await play(rows, number):
            (flat if is_flat(group) else varied).append(group)
        missing = len(first) - len(varied)
        if missing <= 0 or number == rounds:
            break
        rows = more(missing, number + 1)
    return [*varied, *flat][: len(first)]
