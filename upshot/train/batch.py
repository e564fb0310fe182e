"""What the learner is given: sequences with a loss mask, laid end to end in micro-batches by token budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from upshot.rollout.reply import Reply


@dataclass
class Datum:
    """One sequence to learn from. All lists run beside `ids`."""

    ids: list[int]
    mask: list[int]
    """1 on the tokens that are trained: those the policy sampled, or a demonstration's assistant turns. The first token
    of a sequence, which nothing predicts, never is."""
    old: list[float] = field(default_factory=list)
    """Log-probabilities under the policy before the step's first update, to which the policy gradient's ratio is."""
    advantages: list[float] = field(default_factory=list)
    reference: list[float] = field(default_factory=list)
    """Log-probabilities under the frozen initial model."""
    values: list[float] = field(default_factory=list)
    """ppo: the value head's estimates at sampling time."""
    returns: list[float] = field(default_factory=list)
    """ppo: what the value head should say."""
    weights: list[float] = field(default_factory=list)
    """Importance of each token: the learner's probability over the sampler's (importance.py)."""

    @property
    def places(self) -> list[int]:
        """The positions of the trained tokens."""
        return [place for place, bit in enumerate(self.mask) if bit and place]


@dataclass
class Batch:
    """Sequences as flat tokens, N of them, and the M tokens among those that are trained."""

    ids: Tensor
    """[N] One sequence after the other."""
    positions: Tensor
    """[N] Of each token in its sequence."""
    lengths: tuple[int, ...]
    """Of the sequences, in order."""
    rows: Tensor
    """[M] Where in N a trained token is predicted: at the token before it."""
    targets: Tensor
    """[M] The trained tokens' ids."""
    owner: Tensor
    """[M] Which sequence a trained token is of."""
    columns: dict[str, Tensor]
    """[M] each: old, advantages, reference, values, returns, those the data have."""

    @property
    def sequences(self) -> int:
        """How many sequences there are."""
        return len(self.lengths)

    def sums(self, per_token: Tensor) -> Tensor:
        """[M] → [sequences]: sums over the trained tokens of each sequence."""
        return per_token.new_zeros(self.sequences).index_add(0, self.owner, per_token)

    def counts(self) -> Tensor:
        """[sequences] How many trained tokens each sequence has."""
        return self.sums(torch.ones_like(self.owner, dtype=torch.float32))


@dataclass
class Found:
    """What a forward says of the trained tokens, [M] each."""

    logprobs: Tensor
    entropy: Tensor | None = None
    """Of the distribution that each token was drawn from."""
    values: Tensor | None = None
    """The value head's estimate before each token."""


COLUMNS = ("old", "advantages", "reference", "values", "returns", "weights")


def pack(data: Sequence[Datum], device: torch.device | str) -> Batch:
    """Lay sequences end to end."""
    lengths = tuple(len(datum.ids) for datum in data)
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    places = [datum.places for datum in data]
    present = [name for name in COLUMNS if all(len(getattr(d, name)) == len(d.ids) for d in data)]

    def whole(rows: Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor([x for row in rows for x in row], dtype=torch.long).to(device)

    def column(name: str) -> Tensor:
        kept = [getattr(d, name)[place] for d, own in zip(data, places, strict=True) for place in own]
        return torch.tensor(kept, dtype=torch.float32).to(device)

    return Batch(
        ids=whole([d.ids for d in data]),
        positions=whole([range(length) for length in lengths]),
        lengths=lengths,
        rows=whole([[start + place - 1 for place in own] for start, own in zip(starts, places, strict=True)]),
        targets=whole([[d.ids[place] for place in own] for d, own in zip(data, places, strict=True)]),
        owner=whole([[i] * len(own) for i, own in enumerate(places)]),
        columns={name: column(name) for name in present},
    )


def unpack(data: Sequence[Datum], found: Tensor) -> list[list[float]]:
    """Values of the trained tokens [M] as lists beside the ids of each datum, 0 where a token is not trained."""
    left = iter(found.tolist())
    out = []
    for datum in data:
        row = [0.0] * len(datum.ids)
        for place in datum.places:
            row[place] = next(left)
        out.append(row)
    return out


def micro_batches(units: Sequence[Sequence[Datum]], token_budget: int) -> list[list[Datum]]:
    """Units (one datum, or a pair that must stay together) in bins of at most `token_budget` tokens.

    Long ones first, neighbours of like length; a unit larger than the budget gets a bin of its own.
    """
    sizes = [sum(len(datum.ids) for datum in unit) for unit in units]
    bins: list[list[Datum]] = []
    room = 0
    for i in sorted(range(len(units)), key=lambda i: (-sizes[i], i)):
        if bins and sizes[i] <= room:
            bins[-1].extend(units[i])
        else:
            bins.append(list(units[i]))
            room = token_budget
        room -= sizes[i]
    return bins


def data_of(reply: Reply) -> list[Datum]:
    """A played reply as training data: one sequence, or one a turn where the credit says so; none without advantages.

    Trained are the spans that have an advantage; the others are context.
    """
    conversation = reply.conversation
    ids = conversation.ids
    if reply.credit is None:
        return []
    mask = [0] * len(ids)
    advantages = [0.0] * len(ids)
    for span, advantage in zip(reply.credit.spans, reply.advantages, strict=True):
        if advantage is not None:
            advantages[span.start : span.stop] = [advantage] * (span.stop - span.start)
            mask[span.start : span.stop] = [1] * (span.stop - span.start)
    whole = Datum(ids, mask, conversation.logprobs, advantages)
    pieces = [_turn(whole, at, at + len(s.ids)) for at, s in conversation.places()] if reply.credit.split else [whole]
    return [datum for datum in pieces if any(datum.mask)]


def _turn(whole: Datum, start: int, stop: int) -> Datum:
    """The sequence up to the end of a turn, with only that turn trained."""
    mask = [0] * start + whole.mask[start:stop]
    return Datum(whole.ids[:stop], mask, whole.old[:stop], whole.advantages[:stop])
