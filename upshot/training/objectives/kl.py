"""The KL divergence taken off the reward: `train.kl.where: reward`.

A reply's main reward is lessened by kl x the sum over its sampled tokens of log p_sampled - log p_initial. Credited by
turns, a turn pays for its own tokens and those after it as it earns: discounted by `credit.gamma` a turn. Other parts
(a classmate's) pay nothing: the tokens they are credited with pay already.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from upshot.core.score import Score
from upshot.rewards.credit import MAIN, Credit, is_turn
from upshot.rollout.reply import Branch, Rollout
from upshot.training.learner.batch import Datum
from upshot.training.objectives.objectives import LogprobSource


def charge_replies(
    learner: LogprobSource, groups: Sequence[Sequence[Rollout | Branch]]
) -> tuple[list[list[Credit | None]], dict[str, float]]:
    """The credits of a step's replies with the divergence taken off, and what to log."""
    replies = [reply for group in groups for reply in group if reply.credit is not None]
    data = [Datum(r.conversation.ids, r.conversation.mask, r.conversation.logprobs) for r in replies]
    paid: dict[int, Credit] = {}
    total = count = 0.0
    for reply, datum, reference in zip(replies, data, learner.logprobs(data, reference=True), strict=True):
        ratios = [old - ref if bit else 0.0 for old, ref, bit in zip(datum.old, reference, datum.mask, strict=True)]
        total, count = total + math.fsum(ratios), count + len(datum.places)
        assert reply.credit is not None
        paid[id(reply)] = charge_credit(reply.credit, [learner.config.kl.weight * ratio for ratio in ratios])
    logs = {"policy/kl_to_reference": total / max(count, 1)}
    return [[paid.get(id(reply)) for reply in group] for group in groups], logs


def charge_credit(credit: Credit, costs: Sequence[float]) -> Credit:
    """The credit after its main parts paid for the tokens from the first one they are credited with to the end."""
    after, end = 0.0, len(costs)
    starts = {name: min((s.start for s in credit.spans if name in s.parts), default=end) for name in credit.parts}
    owed = {MAIN: math.fsum(costs[starts[MAIN] :])} if MAIN in starts else {}
    for turn in sorted(filter(is_turn, starts), key=lambda name: starts[name], reverse=True):
        after, end = math.fsum(costs[starts[turn] : end]) + credit.gamma * after, starts[turn]
        owed[turn] = after
    paid = {
        name: Score(s.value - owed[name]) for name, s in credit.parts.items() if name in owed and s.value is not None
    }
    return replace(credit, parts={**credit.parts, **paid})
