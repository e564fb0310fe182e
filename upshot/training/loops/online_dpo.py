"""Online preference training: replies of the policy itself, ranked by what came of them.

Each round plays `group_size` replies to every row with their futures. The best of a group stands against its worst when
their rewards are at least `min_gap` apart; a reply without a reward takes no part. Credited along the tree, so does the
best branch of every fork against the worst. Trained are the ids that were sampled. The reference is the model that the
phase began with.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from upshot.config.recipe import TrainConfig
from upshot.rollout.rollout import Branch, Rollout
from upshot.tasks.datasets.records import ROUNDING
from upshot.training.learner.batch import Datum
from upshot.training.learner.learner import Learner
from upshot.training.loops.base import LoopRun
from upshot.training.loops.dpo import prepare as prepare_pairs
from upshot.training.loops.minibatches import Round
from upshot.training.loops.rl import play_and_learn

Candidate = Rollout | Branch
Pair = tuple[Candidate, Candidate]


async def train(run: LoopRun, config: TrainConfig) -> None:
    """Train from the run's step to `train.steps`."""
    await play_and_learn(run, config, prepare, reference=True)


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


def prepare(learner: Learner, groups: Sequence[Sequence[Rollout]]) -> Round:
    """What is learned from the pairs of a step."""
    forks = [fork for group in groups for reply in group for fork in reply.siblings]
    pairs, left_out = best_and_worst([*groups, *forks], learner.config.dpo.min_gap)
    given = prepare_pairs(learner, [(_datum(best), _datum(worst)) for best, worst in pairs])
    given.logs = {f"dpo/left_out/{why}": float(count) for why, count in sorted(left_out.items())}
    return given


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
