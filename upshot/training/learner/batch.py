"""The learner's input: sequences with a loss mask, laid out as flat tokens in micro-batches by token budget.

Sequences lie end to end, or as a tree in which shared beginnings occur once. A token's hidden state depends only on the
tokens before it. So sequences that begin alike (the replies to one prompt, the turns of one conversation) can share the
segment they begin with, whether it is trained or not: each reads its rows from it, and their gradients add up there.
Whole blocks of tokens are shared, so that no segment is tiny.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import compress, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from upshot.rollout.reply import Branch, Rollout

WITHOUT_PLAN = 16384
"""Tokens of a micro-batch where memory is not planned (on the CPU)."""
BLOCK = 16
"""Beginnings are shared in multiples of this many tokens."""
COPY = 1 / 16
"""The cost of copying a key next to others for a reply, in units of the cost of a token: some ten thousand bytes
against millions of multiplications per layer."""

Ids = np.ndarray
"""Token ids of a sequence, int32."""


@dataclass
class Datum:
    """One sequence to learn from. All lists run beside `ids`."""

    ids: list[int]
    mask: list[int]
    """1 on the trained tokens: those the policy sampled, or a demonstration's assistant turns. The first token of a
    sequence is never trained, since nothing predicts it."""
    old: list[float] = field(default_factory=list)
    """Log-probabilities before the step's first update; the policy gradient's ratio divides by them."""
    advantages: list[float] = field(default_factory=list)
    reference: list[float] = field(default_factory=list)
    """Log-probabilities under the frozen initial model."""
    values: list[float] = field(default_factory=list)
    """ppo: the value head's estimates at sampling time."""
    returns: list[float] = field(default_factory=list)
    """ppo: what the value head should say."""
    weights: list[float] = field(default_factory=list)
    """Importance of each token: the learner's probability over the sampler's (`objectives/objectives.py`)."""
    sampled: list[float] = field(default_factory=list)
    """Log-probabilities under the sampler, where `old` is not those (`train.importance`)."""
    share: float = 1.0
    """What its loss counts for."""
    counted: bool = True
    """Whether it counts in the denominators of a step's means. What the policy says in a reply's futures does not: its
    loss is added to the reply's, which stays the same with and without it."""
    source: Rollout | Branch | None = field(default=None, repr=False, compare=False)
    """The reply or branch it was made of, if any."""

    @cached_property
    def array(self) -> Ids:
        """The ids, for comparing sequences."""
        return np.array(self.ids, dtype=np.int32)

    @property
    def places(self) -> list[int]:
        """The positions of the trained tokens."""
        return list(compress(range(1, len(self.mask)), self.mask[1:]))


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of flat tokens; it attends to itself and to the segments it continues."""

    start: int
    """Its first flat token."""
    length: int
    parent: int = -1
    """The segment that it continues; -1: it begins a sequence."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the tokens of sequences are."""

    segments: tuple[Segment, ...]
    """Parents stand before their children; together they are all flat tokens, in order."""
    paths: tuple[tuple[int, ...], ...]
    """The segments of each sequence."""

    @property
    def tokens(self) -> int:
        """How many flat tokens there are."""
        return self.segments[-1].start + self.segments[-1].length if self.segments else 0

    @property
    def shares(self) -> bool:
        """Whether any segment continues another."""
        return any(segment.parent >= 0 for segment in self.segments)

    def places(self, path: Sequence[int]) -> np.ndarray:
        """The flat tokens of some segments, in order."""
        runs = [self.segments[i].start + np.arange(self.segments[i].length) for i in path]
        return np.concatenate(runs) if runs else np.zeros(0, dtype=np.int64)


@dataclass
class TrainBatch:
    """Sequences as flat tokens, N of them, and the M tokens among those that are trained."""

    ids: Tensor
    """[N] One sequence after another; a beginning that several share is there once."""
    positions: Tensor
    """[N] The position of each token in its sequence."""
    lengths: tuple[int, ...]
    """Of the sequences, in order."""
    rows: Tensor
    """[M] Where in N a trained token is predicted: at the token before it."""
    targets: Tensor
    """[M] The trained tokens' ids."""
    owner: Tensor
    """[M] The sequence that a trained token belongs to."""
    layout: Layout
    """Where in N the sequences are."""
    columns: dict[str, Tensor]
    """[M] each: old, sampled, advantages, reference, values, returns, those the data have."""
    share: Tensor | None = None
    """[sequences] The weight of each one's loss; None: all count alike."""

    def sums(self, per_token: Tensor) -> Tensor:
        """[M] → [sequences]: sums over the trained tokens of each sequence."""
        return sum_rows(len(self.lengths), self.owner, per_token)

    def counts(self) -> Tensor:
        """[sequences] How many trained tokens each sequence has."""
        return self.sums(torch.ones_like(self.owner, dtype=torch.float32))


@dataclass
class ForwardOutput:
    """What a forward computes for the trained tokens, [M] each."""

    logprobs: Tensor
    entropy: Tensor | None = None
    """Of the distribution that each token was drawn from."""
    values: Tensor | None = None
    """The value head's estimate before each token."""


def sum_rows(count: int, places: Tensor, values: Tensor) -> Tensor:
    """[count, …] Sums of the values by place, added in the same order every time.

    On a GPU index_add adds by atomics, in whatever order they come: a resumed run would differ in the last bits.
    """
    sums = values.new_zeros(count, *values.shape[1:])
    return sums.index_put_((places,), values, True) if values.is_cuda else sums.index_add_(0, places, values)


COLUMNS = ("old", "sampled", "advantages", "reference", "values", "returns", "weights")


def pack(data: Sequence[Datum], device: torch.device | str, share: bool = False) -> TrainBatch:
    """Lay sequences end to end; with `share`, a beginning that several have in common is laid once."""
    sequences = [datum.array for datum in data]
    lengths = tuple(map(len, sequences))
    layout = tree(sequences) if share else end_to_end(lengths)
    ids, positions = np.empty((2, layout.tokens), dtype=np.int64)
    trained = [np.array(datum.places, dtype=np.int64) for datum in data]
    rows, targets = [], []
    for sequence, path, places in zip(sequences, layout.paths, trained, strict=True):
        at = layout.places(path)
        ids[at], positions[at] = sequence, np.arange(len(sequence))
        rows.append(at[places - 1])
        targets.append(sequence[places])
    columns = {}
    for name in COLUMNS:
        values = [getattr(datum, name) for datum in data]
        if [*map(len, values)] == [*lengths]:
            picked = [np.array(row, dtype=np.float32)[places] for row, places in zip(values, trained, strict=True)]
            columns[name] = on_device(np.concatenate(picked), device)
    shares = np.array([datum.share for datum in data], dtype=np.float32)
    return TrainBatch(
        ids=on_device(ids, device),
        positions=on_device(positions, device),
        lengths=lengths,
        rows=on_device(np.concatenate(rows), device),
        targets=on_device(np.concatenate(targets).astype(np.int64), device),
        owner=on_device(np.repeat(np.arange(len(data)), [len(places) for places in trained]), device),
        layout=layout,
        columns=columns,
        share=on_device(shares, device) if (shares != 1.0).any() else None,
    )


def on_device(array: np.ndarray, device: torch.device | str) -> Tensor:
    """An array as a tensor. The copy to a GPU does not wait for the GPU's current work."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    cuda = torch.device(device).type == "cuda"
    return tensor.pin_memory().to(device, non_blocking=True) if cuda else tensor.to(device)


def unpack(data: Sequence[Datum], values: Tensor) -> list[list[float]]:
    """Values of the trained tokens [M] as lists beside the ids of each datum, 0 where a token is not trained."""
    left = iter(values.tolist())
    out = []
    for datum in data:
        row = [0.0] * len(datum.ids)
        for place in datum.places:
            row[place] = next(left)
        out.append(row)
    return out


def micro_batches(units: Sequence[Sequence[Datum]], token_budget: int, share: bool = False) -> list[list[Datum]]:
    """Units (one datum, or a pair that must stay together) in bins of at most `token_budget` flat tokens.

    Longest units first. With `share`, units that begin alike are neighbours, and their common beginning counts once;
    they stay together if they fit and the bin before them is at least half full, since in two bins their beginning
    would be computed twice. A unit larger than the budget gets its own bin.
    """
    token_budget = token_budget or WITHOUT_PLAN
    ids = [[datum.array for datum in unit] for unit in units]
    sizes = [_added_tokens(sequences, []) if share else sum(map(len, sequences)) for sequences in ids]
    keys: list[Any] = [prefix_key(sequences[0]) for sequences in ids] if share else [-size for size in sizes]
    runs: list[list[tuple[int, int]]] = []  # units that begin alike, each with the tokens that it adds
    last: list[Ids] = []
    for i in sorted(range(len(units)), key=keys.__getitem__):
        size = _added_tokens(ids[i], last) if share else sizes[i]
        if size == sizes[i]:
            runs.append([])
        runs[-1].append((i, size))
        last = ids[i]
    bins: list[list[Datum]] = []
    room = 0
    for run in runs:
        if room < sum(size for _, size in run) <= token_budget and room <= token_budget // 2:
            room = 0  # begin a new bin
        for i, size in run:
            if bins and size <= room:
                bins[-1].extend(units[i])
                room -= size
            else:
                bins.append(list(units[i]))
                room = token_budget - sizes[i]
    return bins


def _added_tokens(added: Sequence[Ids], last: Sequence[Ids]) -> int:
    """How many tokens sequences add at most to a tree that holds `last`."""
    return shared_tokens([*added, *last]) - shared_tokens(last)


def data_of(reply: Rollout | Branch, share: float = 1.0, counted: bool = True) -> list[Datum]:
    """A played reply as training data: one sequence, or one a turn where the credit says so; none without advantages.

    Trained are the spans that have an advantage; the others are context. `share`, `counted`: as in `Datum`.
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
    whole = Datum(ids, mask, conversation.logprobs, advantages, share=share, counted=counted, source=reply)
    pieces = [_turn(whole, at, at + len(s.ids)) for at, s in conversation.places()] if reply.credit.split else [whole]
    return [datum for datum in pieces if any(datum.mask)]


def _turn(whole: Datum, start: int, stop: int) -> Datum:
    """The sequence up to the end of a turn, with only that turn trained."""
    mask = [0] * start + whole.mask[start:stop]
    return replace(whole, ids=whole.ids[:stop], mask=mask, old=whole.old[:stop], advantages=whole.advantages[:stop])


def end_to_end(lengths: Sequence[int]) -> Layout:
    """One segment a sequence."""
    starts = np.cumsum([0, *lengths]).tolist()
    return Layout(tuple(map(Segment, starts, lengths)), tuple([(i,) for i in range(len(lengths))]))


def tree(sequences: Sequence[Ids], block: int = BLOCK) -> Layout:
    """A layout in which a beginning that sequences have in common is one segment."""
    keys = list(map(prefix_key, sequences))
    order = sorted(range(len(sequences)), key=keys.__getitem__)
    common = [0] + [common_prefix(sequences[a], sequences[b], block) for a, b in pairwise(order)]
    segments: list[Segment] = []
    paths: list[tuple[int, ...]] = [()] * len(sequences)

    # Sequences order[first:stop], which begin with the `depth` tokens of `path`; the next ones on top.
    todo: list[tuple[int, int, int, tuple[int, ...]]] = [(0, len(sequences), 0, ())] if sequences else []
    while todo:
        first, stop, depth, path = todo.pop()
        only = stop - first == 1
        until = len(sequences[order[first]]) if only else min(common[first + 1 : stop])
        if until > depth:
            start = segments[-1].start + segments[-1].length if segments else 0
            segments.append(Segment(start, until - depth, path[-1] if path else -1))
            path = (*path, len(segments) - 1)
        if only:
            paths[order[first]] = path
            continue
        cuts = [first] + [i for i in range(first + 1, stop) if common[i] == until] + [stop]
        todo += [(a, b, until, path) for a, b in reversed(list(pairwise(cuts)))]
    return Layout(tuple(segments), tuple(paths))


def common_prefix(a: Ids, b: Ids, block: int = BLOCK) -> int:
    """How many tokens two sequences begin with in common, in whole blocks."""
    size = min(len(a), len(b))
    different = np.flatnonzero(a[:size] != b[:size])
    return (int(different[0]) if len(different) else size) // block * block


def shared_tokens(sequences: Sequence[Ids]) -> int:
    """How many tokens sequences have if a common beginning counts once."""
    ordered = sorted(sequences, key=prefix_key)  # no other sequence shares more with one than its neighbour does
    return sum(map(len, ordered)) - sum(common_prefix(a, b) for a, b in pairwise(ordered))


def prefix_key(ids: Ids) -> bytes:
    """Sorted by this, sequences that begin alike are neighbours."""
    return ids.astype(">i4").tobytes()


def worth_sharing(sequences: Sequence[Sequence[int] | Ids]) -> bool:
    """Whether a tree saves more tokens than it costs in keys that must be copied side by side for attention."""
    layout = tree([np.asarray(ids, dtype=np.int32) for ids in sequences])
    saved = sum(map(len, sequences)) - layout.tokens
    keys: list[int] = []  # that each segment attends to: its own, and those of the segments it continues
    for segment in layout.segments:
        keys.append(segment.length + (keys[segment.parent] if segment.parent >= 0 else 0))
    return saved > COPY * sum(keys)
