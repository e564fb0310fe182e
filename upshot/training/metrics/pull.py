"""Do parts of a reward pull the thought against the outcome? Said once, of the first batch, before it is learned from.

Correlations within groups: what prompts have in common (an easy one is answered right and read easily) says nothing
about what is rewarded among the replies to one of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from upshot.rewards.credit import MAIN, is_turn
from upshot.rewards.monitor import METRIC
from upshot.rollout.reply import Rollout

SURE = 2.0
"""Standard errors from which a correlation is one."""


def describe_pull(groups: Sequence[Sequence[Rollout]]) -> str:
    """One line about every part beside the main one and the outcome; '' where there is none."""
    credits = [reply.credit for group in groups for reply in group if reply.credit is not None]
    names = dict.fromkeys(name for credit in credits for name in credit.parts if name != MAIN and not is_turn(name))
    sentences = [_tell(name, [pairs for group in groups if (pairs := _pairs(group, name))]) for name in names]
    return f"the first batch: {'; '.join(sentences)}" if sentences else ""


def _pairs(group: Sequence[Rollout], part: str) -> list[tuple[float, float]]:
    """(outcome, part) of the replies to a prompt that have both: the verdict, else the main part."""
    out = []
    for reply in group:
        parts = reply.credit.parts if reply.credit is not None else {}
        outcome, score = reply.reward.means.get(METRIC, parts.get(MAIN)), parts.get(part)
        if outcome is not None and score is not None and outcome.value is not None and score.value is not None:
            out.append((outcome.value, score.value))
    return out


def _tell(part: str, groups: Sequence[Sequence[tuple[float, float]]]) -> str:
    correlation, count = correlate(groups)
    if correlation is None:
        return f"'{part}' and the outcome do not vary within any prompt, so nothing is known of how they pull"
    over = f"(correlation {correlation:+.2f} within prompts, {count} replies)"
    if abs(correlation) * math.sqrt(count) < SURE:
        return f"'{part}' pulls neither with nor against the outcome {over}"
    if correlation > 0:
        return f"'{part}' pulls with the outcome {over}"
    return f"'{part}' pulls the thought AGAINST the outcome {over}: lower its weight, or gate it by the verdict"


def correlate(groups: Sequence[Sequence[tuple[float, float]]]) -> tuple[float | None, int]:
    """Pearson's correlation of pairs centred by their group, and over how many; None where either is constant."""
    centred = []
    for group in groups:
        means = [math.fsum(values) / len(group) for values in zip(*group, strict=True)]
        centred += [(one - means[0], other - means[1]) for one, other in group]
    squares = math.fsum(x * x for x, _ in centred) * math.fsum(y * y for _, y in centred)
    if squares < 1e-18:
        return None, len(centred)
    return math.fsum(x * y for x, y in centred) / math.sqrt(squares), len(centred)
