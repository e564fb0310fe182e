"""What the learner is given: sequences with a loss mask, packed into micro-batches by token budget."""

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
    """1 on the tokens that are trained: those the policy sampled, or a demonstration's assistant turns."""
    old: list[float] = field(default_factory=list)
    """Log-probabilities at sampling time."""
    advantages: list[float] = field(default_factory=list)
    reference: list[float] = field(default_factory=list)
    """Log-probabilities under the frozen initial model."""
    values: list[float] = field(default_factory=list)
    """ppo: the value head's estimates at sampling time."""
    targets: list[float] = field(default_factory=list)
    """ppo: what the value head should say."""


@dataclass
class Batch:
    """Data padded on the right, as tensors B × T."""

    ids: Tensor
    attention: Tensor
    mask: Tensor
    columns: dict[str, Tensor]
    """old, advantages, reference, values, targets: those the data have."""


COLUMNS = ("old", "advantages", "reference", "values", "targets")


def collate(data: Sequence[Datum], pad: int, device: torch.device | str) -> Batch:
    """Pad data to the longest of them."""
    width = max(len(datum.ids) for datum in data)

    def stack(rows: Sequence[Sequence[float]], fill: float, dtype: torch.dtype) -> Tensor:
        padded = [[*row, *[fill] * (width - len(row))] for row in rows]
        return torch.tensor(padded, dtype=dtype, device=device)

    present = [name for name in COLUMNS if all(len(getattr(d, name)) == len(d.ids) for d in data)]
    return Batch(
        ids=stack([d.ids for d in data], pad, torch.long),
        attention=stack([[1] * len(d.ids) for d in data], 0, torch.long),
        mask=stack([d.mask for d in data], 0, torch.float32),
        columns={name: stack([getattr(d, name) for d in data], 0.0, torch.float32) for name in present},
    )


def micro_batches(units: Sequence[Sequence[Datum]], token_budget: int) -> list[list[Datum]]:
    """Units (one datum, or a pair that must stay together) in bins of at most `token_budget` padded tokens.

    Sorted by length so that little is padded; a unit larger than the budget gets a bin of its own.
    """
    order = sorted(range(len(units)), key=lambda i: (-max(len(d.ids) for d in units[i]), i))
    bins: list[list[Datum]] = []
    width = 0
    for i in order:
        longest = max(len(d.ids) for d in units[i])
        if bins and (len(bins[-1]) + len(units[i])) * width <= token_budget:
            bins[-1].extend(units[i])
        else:
            bins.append(list(units[i]))
            width = longest
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
