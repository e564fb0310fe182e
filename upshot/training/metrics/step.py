"""A step's replies → the numbers of metrics.jsonl. Pure functions; missing values are counted, never zero.

What a task's replies amount to (pass@k, maj@k, turns, feedback used …) comes by task and by difficulty, too, where the
rows say so. Groups are the replies to one prompt. A reply counts as solved when its verdict is 1; a missing verdict
leaves every rate and is counted by reason.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, product
from math import comb
from typing import Any

from upshot.core.conversation import Row
from upshot.core.score import Score
from upshot.rewards.credit import MAIN
from upshot.rollout.credit.rules import is_flat
from upshot.rollout.episode import is_cut
from upshot.rollout.reply import Rollout

SOLVED = 1.0 - 1e-9
BY_LABEL = ("pass@1", "maj@k", "turns", "format_errors", "missing")
"""The numbers that also come by task and difficulty."""
GroupsOf = Callable[[Row], Mapping[str, str]]


def summarise(groups: Sequence[Sequence[Rollout]]) -> dict[str, float]:
    """Means of rewards, parts and metrics, counts of what is missing, and the shape of the conversations."""
    replies = list(chain.from_iterable(groups))
    rewards = [reply.reward for reply in replies if not reply.reward.total.is_missing]
    out = {"reward/missing": float(len(replies) - len(rewards))}
    numbers: defaultdict[str, list[float]] = defaultdict(list)
    numbers["reward/mean"] = [value for reward in rewards if (value := reward.total.value) is not None]
    numbers["reward/extrinsic"] = [reward.extrinsic for reward in rewards]
    numbers["reward/intrinsic"] = [reward.intrinsic for reward in rewards]
    for group in groups:
        totals = [value for reply in group if (value := reply.reward.total.value) is not None]
        if len(totals) > 1:
            numbers["reward/group_std"].append(statistics.pstdev(totals))
        if any(reply.credit is not None and reply.credit.trains for reply in group):
            numbers["reward/flat_groups"].append(float(is_flat(group)))
    parts: dict[str, list[float | None]] = {}
    tested: list[list[Mapping[str, Any]]] = []
    for reply in replies:
        for name, part in reply.credit.parts.items() if reply.credit is not None else ():
            parts.setdefault(name, []).append(part.value)
        for name, mean in reply.reward.means.items():
            if mean.value is not None:
                numbers[f"metric/{name}"].append(mean.value)
        details = [s.detail for f in reply.futures for s in f.scores.values() if isinstance(s.detail, Mapping)]
        if any("outcomes" in detail for detail in details):
            tested.append(details)
    for name in sorted(parts) if parts.keys() != {MAIN} else ():  # alone it is the reward itself
        numbers[f"part/{name}"] = [value for value in parts[name] if value is not None]
        out[f"part/{name}/missing"] = float(parts[name].count(None))
    # Of replies with a verdict on a program, the shares that the judge did not confirm, and that it cannot decide.
    for name in ("believed", "unconfirmed"):
        numbers[f"reward/{name}"] = [float(any(detail.get(name) for detail in details)) for details in tested]
    reasons = Counter([str(score.reason) for score in missing_scores(replies)])
    out |= {f"missing/{reason}": float(reasons[reason]) for reason in sorted(reasons)}
    return out | means(numbers) | _shape(replies)


def by_group(
    replies: Sequence[Rollout], labels: Sequence[Mapping[str, str]], every_score: bool = False
) -> dict[str, float]:
    """Means by the task's groups, which each reply's `labels` name: {'by/opening=ambiguous/reward': …}; every_score: of
    the metrics, too."""
    values: dict[str, list[float]] = {}
    for reply, groups in zip(replies, labels, strict=True):
        scores = {"reward": reply.reward.total}
        if every_score:
            scores |= {f"metric/{name}": mean for name, mean in reply.reward.means.items()}
        for (name, group), (called, score) in product(groups.items(), scores.items()):
            if score.value is not None:
                values.setdefault(f"by/{name}={group}/{called}", []).append(score.value)
    return means(dict(sorted(values.items())))


def missing_scores(replies: Iterable[Rollout]) -> Iterator[Score]:
    """What is missing: rewards without futures, and of every future one score a reason."""
    for reply in replies:
        if reply.futures:
            for future in reply.futures:
                yield from {score.reason: score for score in future.scores.values() if score.is_missing}.values()
        elif reply.reward.total.is_missing:
            yield reply.reward.total


def means(numbers: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The mean of the numbers under each name; nothing where there are none."""
    return {name: statistics.fmean(values) for name, values in numbers.items() if values}


def _shape(replies: Sequence[Rollout]) -> dict[str, float]:
    numbers: defaultdict[str, list[float]] = defaultdict(list)
    for reply in replies:
        if samples := list(reply.samples()):
            numbers["reply_tokens"].append(sum([len(sample.ids) for sample in samples]))
            numbers["turns"].append(len(samples))
            numbers["thought_tokens"].append(sum([s.thought[1] - s.thought[0] for s in samples if s.thought]))
        if reply.conversation.turns:
            numbers["cut"].append(is_cut(reply.conversation.turns[-1]))
        for future in reply.futures:
            messages = future.conversation.messages
            numbers["future_turns"].append(len(messages) - future.shared)
            if future.by == "user" and future.missing is None:
                numbers["futures_left"].append(future.conversation.ended not in ("rounds", "length"))
                # Of each turn that the policy took in a future: whether it had said the same before.
                for place in range(future.shared, len(messages)):
                    if messages[place].role == "assistant":
                        numbers["future_repeats"].append(messages[place] in messages[:place])
    if not any(numbers["thought_tokens"]):
        del numbers["thought_tokens"]
    futures = float(len(numbers["future_turns"]))
    return {f"rollout/{name}": mean for name, mean in means(numbers).items()} | {"rollout/futures": futures}


def task_metrics(groups: Sequence[Sequence[Rollout]], groups_of: GroupsOf) -> dict[str, float]:
    """All the numbers, under 'task/'; and under 'by/KEY=VALUE/' for each of the rows' groups."""
    out = {f"task/{name}": value for name, value in measure_task(groups).items()}
    labels: dict[str, list[Sequence[Rollout]]] = defaultdict(list)
    for group in filter(None, groups):
        for name, value in groups_of(group[0].conversation.row).items():
            labels[f"{name}={value}"].append(group)
    for label in sorted(labels):
        numbers = measure_task(labels[label])
        out |= {f"by/{label}/{name}": numbers[name] for name in numbers if name in BY_LABEL}
    return out


def measure_task(groups: Sequence[Sequence[Rollout]]) -> dict[str, float]:
    """The numbers of some groups of replies."""
    replies = list(chain.from_iterable(groups))
    solved = [[value >= SOLVED for reply in group if (value := verdict(reply).value) is not None] for group in groups]
    numbers: dict[str, list[float]] = {}
    for exponent in range(12):
        k = 2**exponent
        numbers[f"pass@{k}"] = [value for group in solved if (value := pass_at_k(group, k)) is not None]
    numbers["maj@k"] = [value for group in groups if (value := majority(group)) is not None]
    numbers["turns"] = [turns for reply in replies if (turns := len(list(reply.samples())))]
    out = means(numbers)
    counts: Counter[str] = Counter()
    for reply in replies:
        counts.update(reply.conversation.counts)
    for name in sorted(counts):
        out[name] = counts[name] / len(replies)
        if name.endswith("feedback") and counts[name]:
            kind = name.removesuffix("feedback").rstrip("_")
            heeded = counts[f"{name}_used"] / counts[name]
            out[f"feedback_heeded/{kind}" if kind else "feedback_heeded"] = heeded
    missing = Counter([v.reason for reply in replies if (v := verdict(reply)).is_missing])
    out["missing"] = float(missing.total())
    return out | {f"missing/{reason}": float(count) for reason, count in sorted(missing.items())}


def verdict(reply: Rollout) -> Score:
    """The verifier's score of a reply; the total reward where the recipe has no verifier."""
    return reply.reward.means.get("verifier", reply.reward.total)


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
        value = verdict(reply).value
        # The verifier notes the answer it read from a reply with the score.
        scores = [future.scores["verifier"] for future in reply.futures if "verifier" in future.scores]
        answers = [score.detail["answer"] for score in scores if score.detail.get("answer") is not None]
        if value is not None and answers:
            votes[str(answers[0])].append(value >= SOLVED)
    if not votes:
        return None
    most = max(map(len, votes.values()))
    return statistics.fmean(float(solved[0]) for solved in votes.values() if len(solved) == most)
