"""Which tokens get which part of the reward. Pure data.

A `Credit` gives every sampled token of an episode to exactly one span, and every span the names of the reward parts
that its tokens are credited with. The whole reply: one span, one part. Classmate training: the kept thought gets
main + classmate, the rest main.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from upshot.score import Score

MAIN = "main"


@dataclass(frozen=True, slots=True)
class Span:
    """Token positions [start, stop) in the episode's ids, and the reward parts they are credited with."""

    start: int
    stop: int
    parts: tuple[str, ...] = (MAIN,)


@dataclass(frozen=True, slots=True)
class Credit:
    """An episode's reward parts and the spans that earn them."""

    parts: Mapping[str, Score]
    spans: tuple[Span, ...]

    def total(self, parts: tuple[str, ...]) -> Score:
        """The sum of some parts; missing when any of them is."""
        scores = [self.parts[name] for name in parts]
        for score in scores:
            if score.value is None:
                return score
        return Score(sum(score.value or 0.0 for score in scores))


def sampled_spans(mask: Sequence[int], parts: tuple[str, ...] = (MAIN,)) -> tuple[Span, ...]:
    """One span per run of sampled tokens."""
    spans: list[Span] = []
    start: int | None = None
    for position, bit in enumerate([*mask, 0]):
        if bit and start is None:
            start = position
        elif not bit and start is not None:
            spans.append(Span(start, position, parts))
            start = None
    return tuple(spans)


def credit_sampled(total: Score, mask: Sequence[int]) -> Credit:
    """The reward to all sampled tokens alike."""
    return Credit({MAIN: total}, sampled_spans(mask))


def check(credit: Credit, mask: Sequence[int]) -> None:
    """Every sampled token in exactly one span, no other token in any."""
    covered = [0] * len(mask)
    for span in credit.spans:
        for position in range(span.start, span.stop):
            covered[position] += 1
    if covered != [1 if bit else 0 for bit in mask]:
        raise ValueError("credit spans must cover every sampled token once and no other token")
