"""Online preference training: replies of the policy itself, ranked by what came of them.

Each step plays `group_size` replies to every row with their futures. The best of a group is paired with its worst when
their rewards are at least `min_gap` apart; a reply without a reward takes no part. Along the tree, the best branch of a
fork is paired with the worst in the same way, among those that answer the same words: siblings whose users said
different things are continuations of different contexts, and the preference loss compares continuations of one. Trained
are the ids that were sampled. The reference is the model that the phase began with.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from upshot.rollout.reply import Branch, Rollout
from upshot.tasks.datasets.records import ROUNDING
from upshot.training.learner.batch import Datum
from upshot.training.learner.learner import Learner
from upshot.training.loops.dpo import prepare as prepare_pairs
from upshot.training.loops.phase import Lesson
from upshot.training.loops.rl import Groups

Candidate = Rollout | Branch
Pair = tuple[Candidate, Candidate]


def best_and_worst(groups: Sequence[Sequence[Candidate]], min_gap: float) -> tuple[list[Pair], Counter[str]]:
    """The pairs of a step, each of one context, and how many groups gave none for which reason."""
    pairs: list[Pair] = []
    left_out: Counter[str] = Counter()
    for group in groups:
        scored = [one for one in group if one.outcome.value is not None and any(_mask(one))]
        contexts: dict[tuple[int, ...], list[Candidate]] = {}
        for one in scored:
            contexts.setdefault(tuple(one.conversation.ids[: _mask(one).index(1)]), []).append(one)
        comparable = [same for same in contexts.values() if len(same) > 1]
        if not comparable:
            left_out["context" if len(scored) > 1 else "missing"] += 1
        for same in comparable:
            worst, *_, best = sorted(same, key=lambda one: one.outcome.value or 0.0)
            if (best.outcome.value or 0.0) - (worst.outcome.value or 0.0) < max(min_gap - ROUNDING, ROUNDING):
                left_out["gap"] += 1
            elif best.conversation.ids == worst.conversation.ids:
                left_out["same_reply"] += 1
            else:
                pairs.append((best, worst))
    return pairs, left_out


def prepare(learner: Learner, groups: Groups) -> Lesson:
    """The pairs of a step's replies, and their loss."""
    forks = [fork for group in groups for reply in group for fork in reply.siblings]
    pairs, left_out = best_and_worst([*groups, *forks], learner.config.dpo.min_gap)
    lesson = prepare_pairs(learner, [(_datum(best), _datum(worst)) for best, worst in pairs])
    counts = {f"dpo/left_out/{why}": float(count) for why, count in sorted(left_out.items())}
    return replace(lesson, logs=lesson.logs | counts)


def _datum(reply: Candidate) -> Datum:
    return Datum(reply.conversation.ids, _mask(reply))


def _mask(reply: Candidate) -> list[int]:
    """1 on what a reply said, or a branch of its futures, which begins with the reply's words."""
    if isinstance(reply, Rollout):
        return reply.conversation.mask
    mask = [0] * len(reply.conversation.ids)
    for span in reply.credit.spans:
        mask[span.start : span.stop] = [1] * (span.stop - span.start)
    return mask
