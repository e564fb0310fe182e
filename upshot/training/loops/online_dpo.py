"""Online preference training: replies of the policy itself, ranked by what came of them.

Each round plays `group_size` replies to every row with their futures. The best of a group stands against its worst when
their rewards are at least `min_gap` apart; a reply without a reward takes no part. Credited along the tree, so does the
best branch of every fork against the worst. Trained are the ids that were sampled. The reference is the model that the
phase began with.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from upshot.config.method import methods
from upshot.config.recipe import Recipe, TrainConfig
from upshot.core.errors import UserError
from upshot.rollout.rollout import Branch, Rollout
from upshot.tasks.datasets.records import ROUNDING
from upshot.training.learner.batch import Datum
from upshot.training.learner.learner import Learner
from upshot.training.loops.dpo import prepare as prepare_pairs
from upshot.training.loops.minibatches import Lesson
from upshot.training.loops.rl import Groups, RLMethod

Candidate = Rollout | Branch
Pair = tuple[Candidate, Candidate]


@methods.register("online-dpo")
class OnlineDPOMethod(RLMethod):
    """Pairs of the policy's own replies, ranked by reward."""

    credits_tokens = on_ray = False

    def prepare(self, learner: Learner, groups: Groups) -> Lesson:
        """See `Method`."""
        return prepare(learner, groups)

    def needs_reference(self, config: TrainConfig) -> bool:
        """Pairs are compared with it."""
        return True

    def check(self, recipe: Recipe) -> None:
        """Refuse groups without a pair."""
        if recipe.train.group_size < 2:
            raise UserError("online-dpo ranks the replies to a prompt; set train.group_size to 2 or more")


def best_and_worst(groups: Sequence[Sequence[Candidate]], min_gap: float) -> tuple[list[Pair], Counter[str]]:
    """The pairs of a step, and how many groups gave none for which reason."""
    pairs: list[Pair] = []
    left_out: Counter[str] = Counter()
    for group in groups:
        scored = [(reply.outcome.value, reply) for reply in group if reply.outcome.value is not None]
        ranked = sorted((pair for pair in scored if any(_mask(pair[1]))), key=lambda pair: pair[0])
        if len(ranked) < 2:
            left_out["missing"] += 1
            continue
        (low, worst), (high, best) = ranked[0], ranked[-1]
        if high - low < max(min_gap - ROUNDING, ROUNDING):
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
    return replace(lesson, logs={f"dpo/left_out/{why}": float(count) for why, count in sorted(left_out.items())})


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
