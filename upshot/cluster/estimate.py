"""Our estimators on what verl hands to one: token-level rewards, masks and the prompt each row belongs to.

Plain numbers in and out. Rows without trained tokens (verl's padding) and replies that are not there (missing) take no
part in any statistics; a lone survivor of a group gets zero.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from upshot.recipe import Named
from upshot.rewards.credit import MAIN, Credit, Span, sampled_spans, turn_part
from upshot.rewards.estimators.base import estimator
from upshot.score import Score

Rows = Sequence[Sequence[float]]


def advantages(
    rewards: Rows, masks: Sequence[Sequence[int]], prompts: Sequence[Hashable], named: Named, by_turns: bool = False
) -> list[list[float]]:
    """The advantage of every token; 0 where none is trained."""
    credits = [credit_of(own, mask, by_turns) for own, mask in zip(rewards, masks, strict=True)]
    groups: dict[Hashable, list[int]] = {}
    for row, prompt in enumerate(prompts):
        if credits[row] is not None:
            groups.setdefault(prompt, []).append(row)
    estimated = estimator(named.name, named.options)([[credits[row] for row in rows] for rows in groups.values()])
    out = [[0.0] * len(mask) for mask in masks]
    for rows, found in zip(groups.values(), estimated, strict=True):
        for row, values in zip(rows, found, strict=True):
            credit = credits[row]
            assert credit is not None
            for span, value in zip(credit.spans, values, strict=True):
                out[row][span.start : span.stop] = [value or 0.0] * (span.stop - span.start)
    return out


def credit_of(rewards: Sequence[float], mask: Sequence[int], by_turns: bool = False) -> Credit | None:
    """The credit of a row, read back from its scores: one part for all its tokens, or one a run of trained tokens."""
    spans = sampled_spans(mask)
    if not spans:
        return None
    if not by_turns:
        return Credit({MAIN: Score(float(sum(rewards)))}, spans)
    names = [turn_part(number) for number in range(len(spans))]
    parts = {n: Score(float(sum(rewards[s.start : s.stop]))) for n, s in zip(names, spans, strict=True)}
    return Credit(parts, tuple(Span(s.start, s.stop, (n,)) for n, s in zip(names, spans, strict=True)))
