"""Online preference training: replies of the policy itself, ranked by what came of them.

Each round plays `group_size` replies to every row with their futures. The best of a group stands against its worst when
their rewards are at least `min_gap` apart; a reply without a reward takes no part. Trained are the ids that were
sampled. The reference is the model that the phase began with.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from upshot.config.recipe import TrainConfig
from upshot.rollout.rollout import Rollout
from upshot.tasks.datasets.records import ROUNDING
from upshot.training.learner.batch import Datum
from upshot.training.learner.learner import Learner
from upshot.training.loops.base import LoopRun
from upshot.training.loops.dpo import prefer
from upshot.training.loops.rl import minibatches, play_and_learn

Pair = tuple[Rollout, Rollout]


async def train(run: LoopRun, config: TrainConfig) -> None:
    """Train from the run's step to `train.steps`."""
    await play_and_learn(run, config, learn, reference=True)


def best_and_worst(groups: Sequence[Sequence[Rollout]], min_gap: float) -> tuple[list[Pair], Counter[str]]:
    """The pairs of a step, and how many groups gave none for which reason."""
    pairs: list[Pair] = []
    left_out: Counter[str] = Counter()
    for group in groups:
        scored = [(reply.reward.total.value, reply) for reply in group if reply.reward.total.value is not None]
        ranked = sorted((pair for pair in scored if any(pair[1].conversation.mask)), key=lambda pair: pair[0])
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


def learn(learner: Learner, groups: Sequence[Sequence[Rollout]], seed: int) -> dict[str, float]:
    """One round of updates on the pairs of a step."""
    config = learner.config
    pairs, left_out = best_and_worst(groups, config.dpo.min_gap)
    logs = {f"dpo/left_out/{why}": float(count) for why, count in sorted(left_out.items())}
    data = [(_datum(best), _datum(worst)) for best, worst in pairs]
    for part in minibatches(data, config.minibatches, seed) if data else ():
        logs |= prefer(learner, part)
    logs["train/pairs"] = float(len(data))
    logs["train/tokens"] = float(sum(sum(datum.mask) for pair in data for datum in pair))
    return logs


def _datum(reply: Rollout) -> Datum:
    return Datum(reply.conversation.ids, reply.conversation.mask)
