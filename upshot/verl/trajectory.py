"""A played reply → the rows that verl trains on: prompt, response, and a mask of the sampled tokens.

Along the tree the branches of its futures are rows, too. The whole reply is sent with them, because the advantages are
computed from all replies of the step (`train_batch.py`). A reply with nothing to learn from has one row without a
trained token, so that it is counted. A reply that the policy made missing has rows in case it is blamed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from upshot.core.score import Reason, Score
from upshot.rewards.credit import Reward, credit_sampled
from upshot.rollout.blame import by_policy, may_blame
from upshot.rollout.credit.rules import why_silent
from upshot.rollout.reply import Branch, Rollout


@dataclass(frozen=True)
class Trajectory:
    """One row of verl's batch; all lists except the prompt are aligned with `response_ids`."""

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    """1 where the policy sampled a token that has something to learn from."""
    response_logprobs: list[float]


@dataclass(frozen=True)
class RowPlace:
    """The part of a sequence that a row holds: all ids up to `stop`, of which those from `start` on may be trained."""

    source: Rollout | Branch
    start: int
    stop: int


def refuse_long(reply: Rollout, prompt_length: int, response_length: int) -> None:
    """Make a reply missing if verl would cut its prompt or episode, which it does silently and on the left.

    An episode keeps the turns that fit: the policy made it too long, and this must have a cost.
    """
    talk = reply.conversation
    first, length = _first(reply), len(talk.ids)
    why = ""
    if first > prompt_length:
        why = f"a prompt of {first} ids; data.max_prompt_length is {prompt_length}"
    elif length - first > response_length:
        why = f"an episode of {length - first} ids; data.max_response_length is {response_length}"
    if why:
        reply.reward, reply.siblings = Reward(Score.missing(Reason.TOO_LONG, why)), []
        while first <= prompt_length and len(talk.ids) - first > response_length:
            talk.turns = talk.turns[:-1]
        reply.credit = credit_sampled(reply.reward.total, talk.mask) if first <= prompt_length else None


def places_of(reply: Rollout, alone: bool = False, maybe: bool = False) -> list[RowPlace]:
    """The rows of a reply: its own, one per turn if the credit says so, and one for each branch that learns.

    `alone`: whether a branch learns without siblings to compare it with (`trains_every_fork`). `maybe`: include rows
    that may still learn once the whole step is known, because a blamed reply counts as the worst in it.
    """
    maybe = maybe and may_blame(reply)
    forks = [fork for fork in reply.siblings if alone or maybe or why_silent(fork) is None]
    sources: list[Rollout | Branch] = [reply, *(branch for fork in forks for branch in fork)]
    return [place for source in sources for place in _own_places(source, maybe)]


def _own_places(source: Rollout | Branch, maybe: bool) -> list[RowPlace]:
    talk, mask = source.conversation, trained_mask(source, maybe)
    turns = [(at, at + len(s.ids)) for at, s in talk.places()] if source.credit and source.credit.split else []
    return [RowPlace(source, start, stop) for start, stop in turns or [(0, len(mask))] if any(mask[start:stop])]


def trajectories_of(reply: Rollout, filler: int, alone: bool = False, maybe: bool = False) -> list[Trajectory]:
    """The rows of a reply, in the order of its places; `filler`: an id for a row that trains nothing."""
    rows = [_row(place, maybe) for place in places_of(reply, alone, maybe)]
    return rows or [Trajectory([filler], [filler], [0], [0.0])]


def _row(place: RowPlace, maybe: bool) -> Trajectory:
    talk, first, stop = place.source.conversation, _first(place.source), place.stop
    mask = [0] * place.start + trained_mask(place.source, maybe)[place.start : stop]
    return Trajectory(talk.ids[:first], talk.ids[first:stop], mask[first:], talk.logprobs[first:stop])


def trained_mask(source: Rollout | Branch, maybe: bool = False) -> list[int]:
    """1 for each id that has something to learn from; `maybe`: also if the policy made its reward missing."""
    mask = [0] * len(source.conversation.ids)
    for span in source.credit.spans if source.credit is not None else ():
        total = source.credit.total(span.parts) if span.parts and source.credit is not None else None
        if total is not None and (not total.is_missing or (maybe and by_policy(total))):
            mask[span.start : span.stop] = [1] * (span.stop - span.start)
    return mask


def reward_numbers(reply: Rollout, metrics: Sequence[str]) -> dict[str, float]:
    """The means of all metrics, missing ones as NaN, because verl needs the same keys in every row."""
    means = {name: mean.value for name, mean in reply.reward.means.items() if mean.value is not None}
    return {name: means.get(name, math.nan) for name in metrics}


def _first(source: Rollout | Branch) -> int:
    """How many ids the first prompt has; 0 when nothing was sampled."""
    return next((len(sample.context) for sample in source.conversation.samples()), 0)
