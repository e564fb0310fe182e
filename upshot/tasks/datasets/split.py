"""Train and validation never share a goal: candidates are split by goal, never by row."""

from __future__ import annotations

from collections.abc import Sequence

from upshot.tasks.datasets.candidate import Candidate
from upshot.tasks.datasets.collabllm_goals import held_out


def split_by_goal(
    candidates: Sequence[Candidate], share: float, seed: int = 0
) -> tuple[list[Candidate], list[Candidate]]:
    """(train, validation), with `share` of the goals (at least one, if there are two) in validation.

    Which goals those are depends on the seed and the goals alone, not on the order or the number of rows.
    """
    keys = goal_groups(candidates)
    validation = held_out(keys, share, seed)
    train = [c for c, key in zip(candidates, keys, strict=True) if key not in validation]
    return train, [c for c, key in zip(candidates, keys, strict=True) if key in validation]


def goal_groups(candidates: Sequence[Candidate]) -> list[str]:
    """Beside each candidate the name of its group: candidates that share a goal or a conversation share a group."""
    parent: dict[str, str] = {}

    def root(key: str) -> str:
        while parent.setdefault(key, key) != key:
            parent[key] = parent[parent[key]]
            key = parent[key]
        return key

    for candidate in candidates:
        goal = root(candidate.goal_key)
        if candidate.conv_id:  # a conversation whose rows disagree about the goal still stays together
            conv = root("conv:" + candidate.conv_id)
            parent[max(goal, conv)] = min(goal, conv)
    return [root(candidate.goal_key) for candidate in candidates]


def without_goals_of(
    candidates: Sequence[Candidate], other: Sequence[Candidate]
) -> tuple[list[Candidate], list[Candidate]]:
    """(kept, dropped): drops the candidates that share a goal or a conversation with `other`."""
    keys = goal_groups([*candidates, *other])
    taken = set(keys[len(candidates) :])
    kept = [c for c, key in zip(candidates, keys, strict=False) if key not in taken]
    return kept, [c for c, key in zip(candidates, keys, strict=False) if key in taken]
