"""From logits to ids on the CPU: temperature, top-k, top-p, min-p, one uniform number per (seed, position).

The log-probability of an id is that of softmax(logits / temperature) before any cut (temperature 0: softmax(logits)).
Cuts come in this order: the top_k likeliest ids; of those the fewest that hold top_p of their mass; of those the ones
with at least min_p of the likeliest one's probability.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from upshot.engine.sequence import Rules, Sequence

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
    """One number in [0, 1) for each (seed, position): 24 bits, for more of them would round to 1 in float32."""
    return (keys(seeds, positions) >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


def cut(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """`logits` (already divided by temperature) with what the cuts remove set to -inf; one row per setting."""
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
    """The sampling rules of a batch as tensors; built again only when the batch changes."""

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
        self.tops = max((r.top_logprobs for r in rules), default=0)


def sample(logits: Tensor, rows: RowRules, positions: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
    """Sampled ids, their log-probabilities, and all log-probabilities, for float32 `logits` of one row per sequence."""
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
        # Rounding may leave the point at the very end: then the last id with any mass is meant.
        ids = torch.minimum(torch.searchsorted(mass, point, right=True), torch.searchsorted(mass, total))[:, 0]
        if rows.any_greedy:
            ids = torch.where(torch.from_numpy(rows.greedy), logprobs.argmax(-1), ids)
    return ids, logprobs.gather(-1, ids[:, None])[:, 0], logprobs


def apply_grammars(logits: Tensor, rows: Seq[Sequence]) -> None:
    """Set what grammars forbid to -inf, in place; one that fails or allows nothing is its sequence's error."""
    for index, seq in enumerate(rows):
        if seq.grammar is None:
            continue
        try:
            mask = seq.grammar.allowed()
            if not mask.any():
                raise RuntimeError("the grammar allows no id here")
        except Exception as error:  # the row is drawn with the others; `Scheduler.commit` ends the sequence
            seq.error = error
            continue
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: logits.shape[-1]]
        logits[index].masked_fill_(torch.from_numpy(bits == 0).to(logits.device), -torch.inf)
