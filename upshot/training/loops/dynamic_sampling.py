"""Groups whose replies all earned the same teach nothing: telling them, and playing other rows in their place."""

from __future__ import annotations

from collections.abc import Sequence

from upshot.core.conversation import derive_seed
from upshot.rollout.credit.rules import is_flat
from upshot.rollout.reply import Rollout
from upshot.training.loops.phase import pick


def is_replaceable(group: Sequence[Rollout]) -> bool:
    """Whether other rows may be played in the group's place: it is flat, and nothing in it is missing.

    What is missing stays, to be counted: a judge that fails must not be played around.
    """
    whole = all(r.credit is not None and not any(s.is_missing for s in r.credit.parts.values()) for r in group)
    return whole and is_flat(group)


def other_rows(
    groups: Sequence[Sequence[Rollout]], ids: Sequence[str], tried: set[str], step: int, number: int, seed: int
) -> list[int]:
    """Rows to play in the places of a step's flat groups, none of those `tried`, which they join; empty: none is left.

    ids: of all rows. number: which round of replacements it is.
    """
    count = sum(map(is_replaceable, groups))
    order = pick(len(ids), len(ids), 0, derive_seed(seed, "more", step, number)) if count else []
    chosen = [place for place in order if ids[place] not in tried][:count]
    tried.update(ids[place] for place in chosen)
    return chosen


def replace_flat(groups: list[list[Rollout]], played: Sequence[list[Rollout]]) -> None:
    """Put those played groups that are not flat themselves into the places of flat ones."""
    places = [place for place, group in enumerate(groups) if is_replaceable(group)]
    for place, group in zip(places, (group for group in played if not is_replaceable(group)), strict=False):
        groups[place] = group
        for reply in group:
            reply.group = place
