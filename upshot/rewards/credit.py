"""What a reply earned, and which of its tokens earned it: scores → reward → credit. Pure data and pure functions.

A `Reward` is made of the scores of a reply's futures. Per metric: the mean over the futures that have a value, times
the weight, clamped; then summed. A metric without any value makes the reply's reward missing: adding up the rest would
compare sums of different things.

A `Credit` holds the parts of that reward (`main`, `classmate`, `turn 2` …) and gives every sampled token of the
episode to exactly one span, and every span the names of the parts that its tokens are credited with. The whole reply:
one span, one part. Classmate training: the kept thought gets main + classmate, the rest main. By turns: each turn gets
its own. A span without parts is not trained, and neither is one with a part that is missing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import groupby

from upshot.core.conversation import Conversation
from upshot.core.score import Score, mean_score

CLAMP = (-1.0, 1.0)
"""Default bounds of a metric's term in calls outside of recipes, as in the paper."""
MAIN = "main"
"""The part that the reward itself is."""


@dataclass(frozen=True, slots=True)
class MetricWeight:
    """How one metric enters the reward."""

    weight: float = 1.0
    """0 logs the metric without rewarding it."""
    clamp: tuple[float, float] | None = None
    """Bounds of weight × mean; None leaves it unbounded."""
    intrinsic: bool = False
    """Whether it scores how something was said, not what was achieved."""
    tokens: str = "all"
    """Which tokens earn it: all, or those of the 'thought' or the 'answer', as a part of its own."""


@dataclass(frozen=True, slots=True)
class Reward:
    """The reward of one reply, and where it comes from."""

    total: Score
    terms: Mapping[str, Score] = field(default_factory=dict)
    """Per metric: weight × mean over futures, clamped; or missing."""
    means: Mapping[str, Score] = field(default_factory=dict)
    """Per metric: the plain mean over futures."""
    extrinsic: float = 0.0
    """Sum of the present terms about what was achieved."""
    intrinsic: float = 0.0
    """Sum of the present terms about how it was said."""


def combine(futures: Sequence[Mapping[str, Score]], weights: Mapping[str, MetricWeight]) -> Reward:
    """The reward of a reply from the metric scores of its futures."""
    means: dict[str, Score] = {}
    terms: dict[str, Score] = {}
    total, sums = Score(0.0), {False: 0.0, True: 0.0}
    for name, how in weights.items():
        mean = mean_score([scores[name] for scores in futures if name in scores], f"{name}: no future")
        means[name] = terms[name] = mean
        if mean.value is not None:
            low, high = how.clamp or (-math.inf, math.inf)
            terms[name] = Score(min(max(mean.value * how.weight, low), high))
        if how.weight:
            sums[how.intrinsic] += terms[name].value or 0.0
            if mean.value is None and total.value is not None:
                total = Score(None, mean.reason, {**mean.detail, "metric": name})
    if total.value is not None:
        total = Score(sums[False] + sums[True])
    return Reward(total, terms, means, extrinsic=sums[False], intrinsic=sums[True])


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
    split: bool = False
    """Whether every turn is a separate training sample."""
    gamma: float = 1.0
    """By turns: the discount with which a turn's part counts the turn after it."""

    def total(self, parts: tuple[str, ...]) -> Score:
        """The sum of some parts; missing when any of them is."""
        return reduce(plus, [self.parts[name] for name in parts], Score(0.0))

    @property
    def trains(self) -> bool:
        """Whether any token has something to learn from."""
        return any(span.parts and not self.total(span.parts).is_missing for span in self.spans)


def sampled_spans(mask: Sequence[int]) -> tuple[Span, ...]:
    """One span per run of sampled tokens."""
    spans, stop = [], 0
    for sampled, run in groupby(mask, bool):
        start, stop = stop, stop + len(list(run))
        if sampled:
            spans.append(Span(start, stop))
    return tuple(spans)


def relabel(spans: Sequence[Span], start: int, stop: int, more: tuple[str, ...] | None) -> tuple[Span, ...]:
    """The spans with the tokens of [start, stop) credited with `more` parts besides their own; None: with none at all.

    Spans are cut where the range begins and ends; tokens that no span holds stay outside.
    """
    out: list[Span] = []
    for span in spans:
        low, high = max(span.start, start), min(span.stop, stop)
        if low >= high:
            out.append(span)
            continue
        inside = Span(low, high, () if more is None else (*span.parts, *more))
        pieces = (replace(span, stop=low), inside, replace(span, start=high))
        out += [piece for piece in pieces if piece.start < piece.stop]
    return tuple(out)


def credit_sampled(total: Score, mask: Sequence[int]) -> Credit:
    """The reward to all sampled tokens alike."""
    return Credit({MAIN: total}, sampled_spans(mask))


def restrict_to(spans: Sequence[Span], conversation: Conversation, tokens: str) -> tuple[Span, ...]:
    """The spans with only some tokens trained: 'all', those of the 'thought', or those of the 'answer'."""
    out = tuple(spans)
    if tokens == "all":
        return out
    for (at, sample), (start, stop) in zip(conversation.places(), token_ranges(conversation, tokens), strict=True):
        out = relabel(out, at, start, None)
        out = relabel(out, stop, at + len(sample.ids), None)
    return out


def token_ranges(conversation: Conversation, tokens: str) -> list[tuple[int, int]]:
    """Where in the episode's ids each turn's 'thought' or 'answer' stands; empty ranges where a turn has none."""
    out = []
    for at, sample in conversation.places():
        start, stop = (sample.thought or (0, 0)) if tokens == "thought" else (sample.answer, len(sample.ids))
        out.append((at + start, at + stop))
    return out


def credit_turns(
    rewards: Sequence[Score], conversation: Conversation, gamma: float, split: bool = False, ends: Sequence[Score] = ()
) -> Credit:
    """Each turn gets what it and the turns after it earned, those discounted by `gamma` a turn.

    If a turn's reward is missing, its part and those of earlier turns, which include it, are missing; later ones not.
    `ends`: the score of each turn's own futures, which is how the whole conversation ends from there. It is added to
    that turn only: summed over turns, the same end would count several times, and longer conversations would earn more.
    """
    places = list(conversation.places())
    for what, scores in (("rewards", rewards), ("ends", ends or rewards)):
        if len(scores) != len(places):
            raise ValueError(f"{len(scores)} {what} for {len(places)} turns")
    parts: dict[str, Score] = {}
    running = Score(0.0)
    for turn in reversed(range(len(rewards))):
        reward = rewards[turn]
        if reward.value is None or gamma == 0:
            running = reward
        elif running.value is not None:
            running = Score(reward.value + gamma * running.value)
        parts[turn_part(turn)] = plus(running, ends[turn]) if ends else running
    spans = tuple(Span(at, at + len(s.ids), (turn_part(turn),)) for turn, (at, s) in enumerate(places) if s.ids)
    return Credit(dict(reversed(parts.items())), spans, split, gamma)


def plus(one: Score, other: Score) -> Score:
    """The sum of two scores; missing, for its reason, where either is."""
    if one.value is None or other.value is None:
        return one if one.value is None else other
    return Score(one.value + other.value)


def turn_part(turn: int) -> str:
    """The name of the part that a turn (counted from 0) earns."""
    return f"turn {turn + 1}"


def is_turn(part: str) -> bool:
    """Whether a part is what a turn earns."""
    return part.startswith("turn ")
