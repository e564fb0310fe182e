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
    out: dict[str, float] = {"reward/missing": float(sum(r.reward.total.is_missing for r in replies))}
    put_mean(out, "reward/mean", present(r.reward.total for r in replies))
    scored = [r for r in replies if not r.reward.total.is_missing]
    put_mean(out, "reward/extrinsic", [r.reward.extrinsic for r in scored])
    put_mean(out, "reward/intrinsic", [r.reward.intrinsic for r in scored])
    totals = [present(r.reward.total for r in group) for group in groups]
    put_mean(out, "reward/group_std", [statistics.pstdev(values) for values in totals if len(values) > 1])
    measured = [group for group in groups if any(r.credit is not None and r.credit.trains for r in group)]
    put_mean(out, "reward/flat_groups", [float(is_flat(group)) for group in measured])
    names = {name for r in replies if r.credit is not None for name in r.credit.parts}
    for name in sorted(names) if names != {MAIN} else ():  # alone it is the reward itself
        parts = [r.credit.parts[name] for r in replies if r.credit is not None and name in r.credit.parts]
        put_mean(out, f"part/{name}", present(parts))
        out[f"part/{name}/missing"] = float(sum(part.is_missing for part in parts))
    for name in dict.fromkeys(name for r in replies for name in r.reward.means):
        put_mean(out, f"metric/{name}", present(r.reward.means[name] for r in replies if name in r.reward.means))
    # Of replies with a verdict on a program, the shares that the judge did not confirm, and that it cannot decide.
    scores = [
        [s.detail for f in r.futures for s in f.scores.values() if isinstance(s.detail, Mapping)] for r in replies
    ]
    tested = [details for details in scores if any("outcomes" in detail for detail in details)]
    out |= {
        f"reward/{name}": sum(any(detail.get(name) for detail in details) for details in tested) / len(tested)
        for name in ("believed", "unconfirmed")
        if tested
    }
    reasons = Counter(str(score.reason) for score in missing_scores(replies))
    out |= {f"missing/{reason}": float(reasons[reason]) for reason in sorted(reasons)}
    out |= _shape(replies)
    return out


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
        present = {called: score.value for called, score in scores.items() if score.value is not None}
        for (name, group), (called, value) in product(groups.items(), present.items()):
            values.setdefault(f"by/{name}={group}/{called}", []).append(value)
    return {key: statistics.fmean(values[key]) for key in sorted(values)}


def missing_scores(replies: Iterable[Rollout]) -> Iterator[Score]:
    """What is missing: rewards without futures, and of every future one score a reason."""
    for reply in replies:
        if reply.futures:
            for future in reply.futures:
                yield from {score.reason: score for score in future.scores.values() if score.is_missing}.values()
        elif reply.reward.total.is_missing:
            yield reply.reward.total


def present(scores: Iterable[Score]) -> list[float]:
    """The values of the scores that have one."""
    return [score.value for score in scores if score.value is not None]


def put_mean(out: dict[str, float], name: str, values: Iterable[float]) -> None:
    """Note the mean of values under a name; nothing where there are none."""
    if numbers := list(values):
        out[name] = statistics.fmean(numbers)


def _shape(replies: Sequence[Rollout]) -> dict[str, float]:
    samples = [list(reply.samples()) for reply in replies]
    spoken = [s for s in samples if s]
    out: dict[str, float] = {}
    put_mean(out, "rollout/reply_tokens", [float(sum(len(s.ids) for s in turns)) for turns in spoken])
    put_mean(out, "rollout/turns", [float(len(turns)) for turns in spoken])
    thoughts = [float(sum(s.thought[1] - s.thought[0] for s in turns if s.thought)) for turns in spoken]
    if any(thoughts):
        put_mean(out, "rollout/thought_tokens", thoughts)
    put_mean(out, "rollout/cut", [float(is_cut(r.conversation.turns[-1])) for r in replies if r.conversation.turns])
    futures = [f for reply in replies for f in reply.futures]
    put_mean(out, "rollout/future_turns", [float(len(f.conversation.turns) - f.shared) for f in futures])
    out["rollout/futures"] = float(len(futures))
    talked = [future for future in futures if future.by == "user" and future.missing is None]
    put_mean(out, "rollout/futures_left", [float(f.conversation.ended not in ("rounds", "length")) for f in talked])
    repeats = []  # of each turn that the policy took in a future: whether it had said the same before
    for future in talked:
        messages = [turn.message for turn in future.conversation.turns]
        later = range(future.shared, len(messages))
        repeats += [float(messages[at] in messages[:at]) for at in later if messages[at].role == "assistant"]
    put_mean(out, "rollout/future_repeats", repeats)
    return out


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
    out: dict[str, float] = {}
    solved = [[value >= SOLVED for value in present(map(verdict, group))] for group in groups]
    largest = max([1, *map(len, groups)])
    for k in (2**n for n in range(12) if 2**n <= largest):
        put_mean(out, f"pass@{k}", [value for group in solved if (value := pass_at_k(group, k)) is not None])
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
