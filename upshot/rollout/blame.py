"""Who made a score missing, and what it counts as, so that nobody escapes a bad score by making it missing.

What is missing leaves the statistics. Whatever the policy can make missing would therefore be an escape from a bad
score, and it would be learned. So a score that the policy's own words made missing counts as the worst value that the
step has of it. This is the only place that decides whose doing it was, by three things:

- the reason: some cannot be brought about by words (`Reason.cause`);
- the siblings in the group: where none of them was measured, the row or the machine is suspected, and the score stays
  missing. A group of one has no siblings, and no such excuse;
- the same words in another future: if they got a score there, they are not the cause. If one of three users fails to
  answer a reply, the mean of the other two counts. A future in which the policy spoke again has nothing to compare
  with.

The worst of the step and not of the group, because in a group of right answers the worst is right. A random
failure that is blamed on the policy hits all replies equally: it adds noise, but favours none.
Transcripts and `missing/…` keep the missing score; only what is learned changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain

from upshot.core.score import Cause, Score
from upshot.rewards.credit import Credit, relabel
from upshot.rollout.futures.talk import Futures
from upshot.rollout.reply import Future, Rollout

BLAMED = "reward/blamed"
ScoreKey = tuple[str, str, int]
"""Scores of the same key are compared: metric, classmate and cut of the thought ('' and 0 if not a classmate's)."""


def by_policy(score: Score) -> bool:
    """Whether the reason for a missing score is one that the policy can bring about."""
    return score.reason is not None and score.reason.cause is Cause.POLICY


def may_blame(reply: Rollout) -> bool:
    """Whether a score of the reply, or of a future of it, may be missing through the policy."""
    scores = chain([reply.reward.total], *[future.scores.values() for future in reply.futures])
    return any(map(by_policy, scores))


def blame(groups: Sequence[Sequence[Rollout]], futures: Futures) -> dict[str, float]:
    """Make scores that the policy made missing count as the worst of the step: sets `credit` and `counted` of replies.

    Returns what to log: the share of replies changed.
    """
    replies = list(chain.from_iterable(groups))
    parts = [part for reply in replies if reply.credit is not None for part in reply.credit.parts.values()]
    if not any(map(may_blame, replies)) and not any(map(by_policy, parts)):
        return {BLAMED: 0.0} if replies else {}
    before = [_learned_from(reply) for reply in replies]
    bounds = _bounds(replies)
    for group in groups:
        measured = bounds if len(group) == 1 else _bounds(group)
        for reply in group:
            if reply.reward.means and may_blame(reply):  # without means a rule or a failure decided it
                _score_again(reply, {key: bounds[key] for key in measured}, futures)
    lowest = _lowest(replies)
    outcomes = [reply.outcome.value for reply in replies if reply.outcome.value is not None]
    for group in groups:
        known = lowest if len(group) == 1 else {name: lowest[name] for name in _lowest(group)}
        suspected = len(group) == 1 or any(not reply.outcome.is_missing for reply in group)
        for reply in group:
            if reply.credit is not None:
                reply.credit = _with_lowest(reply.credit, known)
            if by_policy(reply.outcome) and outcomes and suspected:
                reply.counted = _counted_as(reply.outcome, min(outcomes))
    changed = sum(learned != _learned_from(reply) for learned, reply in zip(before, replies, strict=True))
    return {BLAMED: changed / len(replies)}


def _learned_from(reply: Rollout) -> tuple[Credit | None, list[Score]]:
    return reply.credit, [branch.outcome for fork in reply.siblings for branch in fork]


def _bounds(replies: Sequence[Rollout]) -> dict[ScoreKey, tuple[float, float]]:
    """The lowest and the highest score of everything that was measured."""
    values: dict[ScoreKey, list[float]] = {}
    for future in (future for reply in replies for future in reply.futures):
        for name, score in future.scores.items():
            if score.value is not None:
                values.setdefault(_key(future, name), []).append(score.value)
    return {key: (min(scores), max(scores)) for key, scores in values.items()}


def _key(future: Future, name: str) -> ScoreKey:
    return (name, future.by, future.cut) if future.cut else (name, "", 0)


def _score_again(reply: Rollout, bounds: Mapping[ScoreKey, tuple[float, float]], futures: Futures) -> None:
    """Score a reply as if the futures that the policy made missing had come out as badly as any."""
    filled = []
    for future in reply.futures:
        worst = {
            name: _counted_as(score, futures.worst(reply, name, bounds[_key(future, name)]))
            for name, score in future.scores.items()
            if _key(future, name) in bounds and _is_own_doing(future, name, reply.futures)
        }
        filled.append(replace(future, scores={**future.scores, **worst}) if worst else future)
    if all(one is future for one, future in zip(filled, reply.futures, strict=True)):
        return
    trial = replace(reply, futures=filled, siblings=[])
    reward, reply.credit = futures.score(trial)
    reply.counted = reward.total
    for branches, scored in zip(reply.siblings, trial.siblings, strict=True):
        for branch, new in zip(branches, scored, strict=True):  # in place: rows on verl refer to these
            branch.reward, branch.credit, branch.share = new.reward, new.credit, new.share


def _is_own_doing(future: Future, name: str, futures: Sequence[Future]) -> bool:
    """Whether the policy's words made a score of a future missing."""
    if not by_policy(future.scores[name]):
        return False
    turns = future.conversation.turns[future.forks[-1] :] if future.forks else ()
    if any(turn.sample is not None for turn in turns):
        return True
    depth = max(len(future.path) - 1, 0)
    same = (future.by, future.turn, future.cut, future.path[:depth])
    siblings = [one for one in futures if (one.by, one.turn, one.cut, one.path[:depth]) == same]
    return all(one.scores[name].is_missing for one in siblings if name in one.scores)


def _lowest(replies: Sequence[Rollout]) -> dict[str, float]:
    """The lowest value of each part of a reward."""
    lowest: dict[str, float] = {}
    for reply in replies:
        for name, score in reply.credit.parts.items() if reply.credit is not None else ():
            if score.value is not None:
                lowest[name] = min(score.value, lowest.get(name, score.value))
    return lowest


def _with_lowest(credit: Credit, lowest: Mapping[str, float]) -> Credit:
    """The credit with the lowest values of the parts that the policy made missing: of an episode that failed, say.

    If no token is credited with such a part (the reply has no thought), all tokens are: all of them led to it.
    """
    names = [name for name, part in credit.parts.items() if by_policy(part) and name in lowest]
    if not names:
        return credit
    filled = {name: _counted_as(credit.parts[name], lowest[name]) for name in names}
    earned = {name for span in credit.spans for name in span.parts}
    end = max((span.stop for span in credit.spans), default=0)
    spans = relabel(credit.spans, 0, end, tuple(name for name in names if name not in earned))
    return replace(credit, parts={**credit.parts, **filled}, spans=spans)


def _counted_as(score: Score, value: float) -> Score:
    """The score with `value` in place of the missing one; its detail keeps the reason."""
    return Score(value, detail={**score.detail, "missing": score.reason})
