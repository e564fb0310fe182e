"""What a task's replies amount to: pass@k, maj@k, turns, feedback used, format errors, missing. Pure functions.

Groups are the replies to one prompt. A reply counts as solved when its verdict is 1; a missing verdict leaves every
rate and is counted by reason. All numbers also come by task and by difficulty, where the rows say so.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from math import comb

from upshot.core.conversation import Row
from upshot.core.score import Score
from upshot.rollout.reply import Rollout
from upshot.training.metrics.step import put_mean

SOLVED = 1.0 - 1e-9
BY_LABEL = ("pass@1", "maj@k", "turns", "format_errors", "missing")
"""The numbers that also come by task and difficulty."""
GroupsOf = Callable[[Row], Mapping[str, str]]


def task_metrics(groups: Sequence[Sequence[Rollout]], groups_of: GroupsOf) -> dict[str, float]:
    """All the numbers, under 'task/'; and under 'by/KEY=VALUE/' for each of the rows' groups."""
    out = {f"task/{name}": value for name, value in measure(groups).items()}
    labels: dict[str, list[Sequence[Rollout]]] = defaultdict(list)
    for group in filter(None, groups):
        for name, value in groups_of(group[0].conversation.row).items():
            labels[f"{name}={value}"].append(group)
    for label in sorted(labels):
        numbers = measure(labels[label])
        out |= {f"by/{label}/{name}": numbers[name] for name in numbers if name in BY_LABEL}
    return out


def measure(groups: Sequence[Sequence[Rollout]]) -> dict[str, float]:
    """The numbers of some groups of replies."""
    replies = list(chain.from_iterable(groups))
    out: dict[str, float] = {}
    largest = max([1, *map(len, groups)])
    for k in (2**n for n in range(12) if 2**n <= largest):
        put_mean(out, f"pass@{k}", [value for group in groups if (value := pass_at_k(verdicts(group), k)) is not None])
    put_mean(out, "maj@k", [value for group in groups if (value := majority(group)) is not None])
    put_mean(out, "turns", [float(turns) for reply in replies if (turns := len(list(reply.samples())))])
    counts: Counter[str] = Counter()
    for reply in replies:
        counts.update(reply.conversation.counts)
    for name in sorted(counts):
        out[name] = counts[name] / len(replies)
        if name.endswith("feedback") and counts[name]:
            kind = name.removesuffix("feedback").rstrip("_")
            heeded = counts[f"{name}_used"] / counts[name]
            out[f"feedback_heeded/{kind}" if kind else "feedback_heeded"] = heeded
    missing = Counter(v.reason for reply in replies if (v := verdict(reply)).is_missing)
    out["missing"] = float(missing.total())
    return out | {f"missing/{reason}": float(count) for reason, count in sorted(missing.items())}


def verdict(reply: Rollout) -> Score:
    """The verifier's score of a reply; the total reward where the recipe has no verifier."""
    return reply.reward.means.get("verifier", reply.reward.total)


def verdicts(group: Iterable[Rollout]) -> list[bool]:
    """Solved or not, of the replies that have a verdict."""
    return [value >= SOLVED for reply in group if (value := verdict(reply).value) is not None]


def pass_at_k(solved: Sequence[bool], k: int) -> float | None:
    """Unbiased estimate of the chance that one of k samples is right; None with fewer than k samples."""
    n, c = len(solved), sum(solved)
    if n < k:
        return None
    return 1.0 - comb(n - c, k) / comb(n, k)


def majority(group: Sequence[Rollout]) -> float | None:
    """Whether the commonest answer of a group is right; ties share the vote; None when no reply shows its answer."""
    votes: dict[str, list[bool]] = defaultdict(list)
    for reply in group:
        value, answer = verdict(reply).value, answer_of(reply)
        if value is not None and answer is not None:
            votes[answer].append(value >= SOLVED)
    if not votes:
        return None
    most = max(map(len, votes.values()))
    return statistics.fmean(float(solved[0]) for solved in votes.values() if len(solved) == most)


def answer_of(reply: Rollout) -> str | None:
    """The answer the verifier read from a reply, as it noted it with the score."""
    for future in reply.futures:
        answer = future.scores["verifier"].detail.get("answer") if "verifier" in future.scores else None
        if answer is not None:
            return str(answer)
    return None
