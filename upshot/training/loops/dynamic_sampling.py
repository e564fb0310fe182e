"""Groups whose replies all earned the same teach nothing: telling them, and playing other rows in their place."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Sequence
from typing import TypeVar

from upshot.rollout.rollout import Rollout

Group = list[Rollout]
T = TypeVar("T")
SAME = 1e-9
"""Rewards closer than this are alike."""


def is_flat(group: Sequence[Rollout]) -> bool:
    """Whether no part of the reward tells the group's replies apart."""
    parts: dict[str, list[float]] = {}
    for reply in group:
        for name, score in reply.credit.parts.items() if reply.credit is not None else ():
            if score.value is not None:
                parts.setdefault(name, []).append(score.value)
    return all(max(values) - min(values) < SAME for values in parts.values())


def is_replaceable(group: Sequence[Rollout]) -> bool:
    """Whether other rows may be played in the group's place: it is flat, and nothing in it is missing.

    What is missing stays, to be counted: a judge that fails must not be played around.
    """
    whole = all(r.credit is not None and not any(s.is_missing for s in r.credit.parts.values()) for r in group)
    return whole and is_flat(group)


def ask_until_varied(
    more: Callable[[int, int], Sequence[T]], first: Sequence[T], rounds: int
) -> Generator[tuple[Sequence[T], int], list[Group], list[Group]]:
    """Asks for rows to be played, and in the places of groups that came out flat other ones, at most `rounds` times.

    Yields the rows of a round and its number, is sent their groups, and returns those that are learned from.
    `more(count, round)` chooses rows. Where rounds or rows do not suffice, flat groups stay.
    """
    kept = yield first, 0
    for number in range(1, rounds + 1):
        places = [place for place, group in enumerate(kept) if is_replaceable(group)]
        rows = more(len(places), number) if places else ()
        if not rows:
            break
        better = [group for group in (yield rows, number) if not is_replaceable(group)]
        for place, group in zip(places, better, strict=False):
            kept[place] = group
            for reply in group:
                reply.group = place
    return kept


async def play_until_varied(
    play: Callable[[Sequence[T], int], Awaitable[list[Group]]],
    more: Callable[[int, int], Sequence[T]],
    first: Sequence[T],
    rounds: int,
) -> list[Group]:
    """The groups of `ask_until_varied`; `play(rows, round)` plays a round."""
    asking = ask_until_varied(more, first, rounds)
    asked = next(asking)
    while True:
        groups = await play(*asked)
        try:
            asked = asking.send(groups)
        except StopIteration as done:
            found: list[Group] = done.value
            return found
