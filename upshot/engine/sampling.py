"""Sampling from logits on the CPU (for cpu/runner.py), and grammars and scoring of given ids (for both runners).

Sampling: temperature, top-k, top-p, min-p, with one uniform number per (seed, position). The reported log-probability
is that of softmax(logits / temperature) before any cut (temperature 0: softmax(logits)). The cuts in their order: the
top_k likeliest ids; of those, the fewest that hold top_p of their mass; of those, the ones with at least min_p times
the likeliest one's probability. kernels/sample.py does the same on a GPU.

Scoring is prefill: a chunk of given ids yields the log-probability of each next id, log softmax(logits) in float32 at
temperature 1. Nothing is sampled, and the scheduler limits how many positions need logits in one step.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from upshot.engine.scheduler import Chunk
from upshot.engine.sequence import Rules, Scored, Sequence, Top, likeliest

NUMBERS = 1 << 25
"""Logits converted to float32 at a time while given ids are scored (128 MiB)."""
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * _MIX1
    x = (x ^ (x >> np.uint64(27))) * _MIX2
    return x ^ (x >> np.uint64(31))


def keys(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """A 64-bit key for each (seed, position): what a sequence draws does not depend on its neighbours."""
    with np.errstate(over="ignore"):
        return _mix(_mix(seeds.astype(np.uint64) + _GOLDEN) + positions.astype(np.uint64) * _GOLDEN)


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """One number in [0, 1) for each (seed, position): 24 bits, because with more of them float32 might round to 1."""
    return (keys(seeds, positions) >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


def cut(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """logits [rows, vocab], already divided by temperature, with cut ids at -inf; the settings are [rows] each."""
    values, order = logits.sort(dim=-1, descending=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    k = torch.where(top_k > 0, top_k, logits.shape[-1])
    keep = rank < k[:, None]
    probs = values.masked_fill(~keep, -torch.inf).softmax(-1)
    # An id stays while the mass before it is under top_p, so the likeliest one always stays.
    keep &= probs.cumsum(-1) - probs < top_p[:, None]
    keep &= probs >= min_p[:, None] * probs[:, :1]
    keep[:, 0] = True
    return torch.full_like(logits, -torch.inf).scatter_(-1, order, values.masked_fill(~keep, -torch.inf))


class RowRules:
    """The sampling rules of a batch as tensors; rebuilt only when the batch changes."""

    def __init__(self, rules: Seq[Rules]) -> None:
        self.temperature = np.array([r.temperature for r in rules], dtype=np.float32)
        self.greedy = self.temperature <= 0
        self.all_greedy = bool(self.greedy.all())
        self.any_greedy = bool(self.greedy.any())
        self.scale = torch.from_numpy(1.0 / np.where(self.greedy, 1.0, self.temperature))[:, None]
        self.plain = bool((self.scale == 1).all())
        self.seeds = np.array([r.seed & 0xFFFFFFFFFFFFFFFF for r in rules], dtype=np.uint64)
        self.cuts = [i for i, r in enumerate(rules) if r.cuts]
        picked = [rules[i] for i in self.cuts]
        self.top_k = torch.tensor([r.top_k for r in picked])
        self.top_p = torch.tensor([r.top_p for r in picked], dtype=torch.float32)
        self.min_p = torch.tensor([r.min_p for r in picked], dtype=torch.float32)
        self.tops = max([r.top_logprobs for r in rules], default=0)


def sample(logits: Tensor, rows: RowRules, positions: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
    """Sampled ids [rows], their log-probabilities [rows], all log-probabilities; of float32 logits [rows, vocab]."""
    logits = logits if rows.plain else logits * rows.scale
    logprobs = logits.log_softmax(-1)
    if rows.all_greedy:
        ids = logprobs.argmax(-1)
    else:
        probs = logprobs.exp()
        if rows.cuts:
            probs[rows.cuts] = cut(logprobs[rows.cuts], rows.top_k, rows.top_p, rows.min_p).exp()
        mass = probs.cumsum(-1)
        total = mass[:, -1:].contiguous()
        point = torch.from_numpy(uniforms(rows.seeds, positions))[:, None] * total
        # Rounding may put the point at the very end: then take the last id with any mass.
        ids = torch.minimum(torch.searchsorted(mass, point, right=True), torch.searchsorted(mass, total))[:, 0]
        ids = ids.clamp(max=logits.shape[-1] - 1)  # NaN logits: any id, as on a GPU
        if rows.any_greedy:
            ids = torch.where(torch.from_numpy(rows.greedy), logprobs.argmax(-1), ids)
    return ids, logprobs.gather(-1, ids[:, None])[:, 0], logprobs


def apply_grammars(logits: Tensor, rows: Seq[Sequence]) -> None:
    """Set ids that grammars forbid to -inf, in place; if one fails or allows nothing, its sequence gets the error."""
    for index, seq in enumerate(rows):
        if seq.grammar is None:
            continue
        try:
            mask = seq.grammar.allowed()
            if not mask.any():
                raise RuntimeError("the grammar allows no id here")
        except Exception as error:  # the row is sampled with the others; `Scheduler.commit` ends the sequence
            seq.error = error
            continue
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: logits.shape[-1]]
        logits[index].masked_fill_(torch.from_numpy(bits == 0).to(logits.device), -torch.inf)


@dataclass(slots=True)
class ScoreRequest:
    """The given ids that a prefill step scores."""

    places: list[int]
    """Indices into the step's packed tokens whose logits are needed."""
    ids: list[int]
    """The given id that each of these logits scores."""
    shares: list[tuple[Sequence, int]]
    """The sequences in their order, and how many of the places each has."""
    tops: int
    """The largest `top_logprobs` of these sequences."""


def score_request(chunks: list[Chunk]) -> ScoreRequest | None:
    """What these chunks, packed one after another, score; None if nothing."""
    wanted = ScoreRequest([], [], [], 0)
    offset = 0
    for chunk in chunks:
        if chunk.seq.given and (after := chunk.scored):
            wanted.places += range(offset + after.start - 1 - chunk.start, offset + after.stop - 1 - chunk.start)
            wanted.ids += chunk.seq.ids[after.start : after.stop]
            wanted.shares.append((chunk.seq, len(after)))
            wanted.tops = max(wanted.tops, chunk.seq.rules.top_logprobs)
        offset += chunk.stop - chunk.start
    return wanted if wanted.shares else None


def given_logprobs(logits: Tensor, ids: Tensor, tops: int) -> tuple[Tensor, ...]:
    """log softmax of logits [rows, vocab] at ids [rows]; with `tops`, also the best values and ids [rows, tops]."""
    rows = max(1, NUMBERS // logits.shape[1])
    parts = []
    for some, chosen in zip(logits.split(rows), ids.split(rows), strict=True):
        every = some.float().log_softmax(-1)
        picked = every.gather(-1, chosen[:, None])[:, 0]
        parts.append((picked, *every.topk(min(tops, every.shape[1]), dim=-1)) if tops else (picked,))
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))


def by_sequence(wanted: ScoreRequest, results: tuple[Tensor, ...]) -> list[Scored]:
    """The results of `given_logprobs`, split by sequence."""
    logprobs = results[0].tolist()
    values, order = (x.tolist() for x in results[1:]) if wanted.tops else ([], [])
    out: list[Scored] = []
    at = 0
    for seq, count in wanted.shares:
        tops: list[Top] = []
        if seq.rules.top_logprobs:
            pairs = zip(order[at : at + count], values[at : at + count], strict=True)
            tops = [likeliest(o, v, seq.rules.top_logprobs) for o, v in pairs]
        out.append((seq, logprobs[at : at + count], tops))
        at += count
    return out
