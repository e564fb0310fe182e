"""Sampling as part of a GPU step: from logits [rows, vocab] to ids and log-probabilities. cuda/runner.py calls it.

A draw inverts the cumulative distribution at one uniform number per (seed, position), by the same hash as on the CPU
(sampling.py), so it depends on nothing but the request. First, programs sum the blocks of the vocabulary, one each;
then one program per row picks a block by these sums and reads only that block again. Cuts (top-k, top-p, min-p) are
found without sorting, by bisection on the bits of the logits, exactly and keeping ties. Only rows with cuts pay for it.

`begin` reads the state of the rows' slots at the start of a decode step, and `sample` advances it at the end.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["n"])
def _begin(
    slots_ptr, tokens_ptr, place_ptr, table_ptr, ids_ptr, positions_ptr, cells_ptr, lengths_ptr, table_stride, n,
    PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = rows < n
    slot = tl.load(slots_ptr + rows, mask=live, other=0).to(tl.int64)
    position = tl.load(place_ptr + slot, mask=live, other=0)
    page = tl.load(table_ptr + slot * table_stride + position // PAGE, mask=live, other=0)
    tl.store(ids_ptr + rows, tl.load(tokens_ptr + slot, mask=live, other=0), mask=live)
    tl.store(positions_ptr + rows, position.to(tl.int64), mask=live)
    tl.store(cells_ptr + rows, page.to(tl.int64) * PAGE + position % PAGE, mask=live)
    tl.store(lengths_ptr + rows, position + 1, mask=live)


def begin(
    slots: Tensor, tokens: Tensor, place: Tensor, table: Tensor, page_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Each row's input id, its position and cell, and the row's length, [rows] each, from the state of its slot."""
    n = len(slots)
    ids, positions, cells = (torch.empty(n, dtype=torch.int64, device=slots.device) for _ in range(3))
    lengths = torch.empty(n, dtype=torch.int32, device=slots.device)
    _begin[(triton.cdiv(n, 128),)](
        slots, tokens, place, table, ids, positions, cells, lengths, table.stride(0), n, PAGE=page_size, BLOCK=128
    )
    return ids, positions, cells, lengths


@triton.jit
def _key(bits, WIDE: tl.constexpr):
    """An integer from the bits of a float, with the same order as the floats."""
    if WIDE:
        negative = bits < 0
        key = tl.where(negative, bits ^ 0x7FFFFFFF, bits)
    else:
        key = tl.where(bits < 0, bits ^ 0x7FFF, bits).to(tl.int32)
    return key


@triton.jit
def _mass_above(logits_ptr, base, key, inverse, top, V, COUNT: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """The number of logits with at least this key (COUNT), or the sum of their exponentials."""
    total = tl.zeros([BLOCK], dtype=tl.int32 if COUNT else tl.float32)
    for start in range(0, V, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + base + cols, mask=cols < V, other=float("-inf"))
        above = (_key(x.to(tl.int32 if WIDE else tl.int16, bitcast=True), WIDE).to(tl.int64) >= key) & (cols < V)
        if COUNT:
            total += above.to(tl.int32)
        else:
            total += tl.where(above, tl.exp((x.to(tl.float32) - top) * inverse), 0.0)
    return tl.sum(total, 0)


@triton.jit
def _bisect(logits_ptr, base, lo, goal, inverse, top, V, COUNT: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """The highest key, from `lo` on, so that `_mass_above` of it is at least `goal`.

    One iteration per bit finds it exactly, ties included, without moving the vocabulary in memory as a sort would.
    """
    hi = tl.full((), 2147483648 if WIDE else 32768, dtype=tl.int64)
    for _ in range(33 if WIDE else 17):
        mid = (lo + hi) >> 1
        enough = _mass_above(logits_ptr, base, mid, inverse, top, V, COUNT, WIDE, BLOCK) >= goal
        lo = tl.where(enough, mid, lo)
        hi = tl.where(enough, hi, mid)
    return lo


@triton.jit
def _threshold(logits_ptr, base, k, top_p, inverse, top, V, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """The lowest key that top-k keeps, and then top-p of what top-k keeps."""
    kept = tl.full((), -2147483648 if WIDE else -32768, dtype=tl.int64)
    if k > 0:
        kept = _bisect(logits_ptr, base, kept, k, inverse, top, V, True, WIDE, BLOCK)
    if top_p < 1.0:
        goal = _mass_above(logits_ptr, base, kept, inverse, top, V, False, WIDE, BLOCK) * top_p
        kept = _bisect(logits_ptr, base, kept, goal, inverse, top, V, False, WIDE, BLOCK)
    return kept


@triton.jit
def _bounds(logits_ptr, base, top_k, top_p, min_p, inverse, V, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """The lower bounds of logits that are kept: a key (top-k, top-p) and a value (min-p)."""
    best = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    for start in range(0, V, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + base + cols, mask=cols < V, other=float("-inf"))
        best = tl.maximum(best, x.to(tl.float32))
    top = tl.max(best, 0)
    kept = _threshold(logits_ptr, base, top_k, top_p, inverse, top, V, WIDE, BLOCK)
    return kept, tl.log(tl.maximum(min_p, 1e-30)) / inverse + top


@triton.jit
def _stays(raw, kept, floor, WIDE: tl.constexpr):
    """Which logits are kept."""
    key = _key(raw.to(tl.int32 if WIDE else tl.int16, bitcast=True), WIDE).to(tl.int64)
    return (key >= kept) & (raw.to(tl.float32) >= floor)


@triton.jit
def _left(logits_ptr, base, inverse, kept, floor, V, WIDE: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """The sums of a row's blocks as in `_sums`, but of the logits that are kept."""
    which = tl.arange(0, BLOCKS)
    left = tl.zeros([BLOCKS], dtype=tl.float32)
    for start in range(0, V, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        raw = tl.load(logits_ptr + base + cols, mask=cols < V, other=float("-inf"))
        x = raw.to(tl.float32) * inverse
        e = tl.exp(x - tl.maximum(tl.max(x, 0), -1e30))  # a grammar may forbid the whole block
        stays = tl.sum(tl.where(_stays(raw, kept, floor, WIDE), e, 0.0), 0)
        left = tl.where(which == start // BLOCK, stays, left)
    return left


@triton.jit
def _uniform(seed, position):
    """The top 24 bits of `sampling.keys` as a number in [0, 1)."""
    x = seed.to(tl.uint64) + 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    x = (x ^ (x >> 31)) + position.to(tl.uint64) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    x = x ^ (x >> 31)
    return (x >> 40).to(tl.int32).to(tl.float32) * (1.0 / 16777216.0)


@triton.jit
def _inverse(temperature):
    """1 / temperature; temperature 0 counts as 1."""
    return 1.0 / tl.where(temperature <= 0.0, 1.0, temperature)


@triton.jit
def _sums(logits_ptr, slots_ptr, temperature_ptr, tops_ptr, masses_ptr, V, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """For one block of a row: the largest logit (by temperature), and the sum of exponentials relative to it."""
    row = tl.program_id(0)
    block = tl.program_id(1)
    inverse = _inverse(tl.load(temperature_ptr + tl.load(slots_ptr + row)))
    cols = block * BLOCK + tl.arange(0, BLOCK)
    raw = tl.load(logits_ptr + row.to(tl.int64) * V + cols, mask=cols < V, other=float("-inf"))
    x = raw.to(tl.float32) * inverse
    top = tl.maximum(tl.max(x, 0), -1e30)  # a grammar may forbid the whole block
    tl.store(tops_ptr + row * BLOCKS + block, top)
    tl.store(masses_ptr + row * BLOCKS + block, tl.sum(tl.exp(x - top), 0))


@triton.jit
def _sample(
    logits_ptr, tops_ptr, masses_ptr, slots_ptr, positions_ptr, temperature_ptr, seeds_ptr, top_k_ptr, top_p_ptr,
    min_p_ptr, tokens_ptr, place_ptr, ids_ptr, logprobs_ptr, dummy, V,
    CUTS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row)
    position = tl.load(positions_ptr + row).to(tl.int32) + 1
    temperature = tl.load(temperature_ptr + slot)
    greedy = temperature <= 0.0
    inverse = _inverse(temperature)
    base = row.to(tl.int64) * V
    lanes = tl.arange(0, BLOCK)
    which = tl.arange(0, BLOCKS)
    kept = tl.full((), -2147483648, dtype=tl.int64)
    floor = tl.full((), float("-inf"), dtype=tl.float32)
    there = which * BLOCK < V
    tops = tl.load(tops_ptr + row * BLOCKS + which, mask=there, other=-1e30)
    masses = tl.load(masses_ptr + row * BLOCKS + which, mask=there, other=0.0)
    left = masses
    if CUTS:
        top_k, top_p, min_p = tl.load(top_k_ptr + slot), tl.load(top_p_ptr + slot), tl.load(min_p_ptr + slot)
        if (temperature > 0.0) & ((top_k > 0) | (top_p < 1.0) | (min_p > 0.0)):
            kept, floor = _bounds(logits_ptr, base, top_k, top_p, min_p, inverse, V, WIDE, BLOCK)
            left = _left(logits_ptr, base, inverse, kept, floor, V, WIDE, BLOCK, BLOCKS)
    m = tl.max(tops, 0)
    shrink = tl.exp(tops - m)
    lse = m + tl.log(tl.sum(masses * shrink, 0))
    weights = left * shrink
    sums = tl.cumsum(weights, 0)
    total = tl.max(sums, 0)
    point = _uniform(tl.load(seeds_ptr + slot), position) * total
    # The cumulative sums may decrease slightly, as a parallel scan rounds differently from thread to thread.
    drawn = tl.min(tl.where((sums > point) & (weights > 0.0), which, BLOCKS), 0)
    # Rounding may put the point at the very end: then take the last block with any mass.
    drawn = tl.minimum(drawn, tl.max(tl.where(weights > 0.0, which, 0), 0))
    block = tl.where(greedy, tl.argmax(tops, 0), drawn)
    before = tl.sum(tl.where(which < block, weights, 0.0), 0)
    cols = block * BLOCK + lanes
    raw = tl.load(logits_ptr + base + cols, mask=cols < V, other=float("-inf"))
    x = raw.to(tl.float32) * inverse
    e = tl.exp(x - m)
    if CUTS:
        e = tl.where(_stays(raw, kept, floor, WIDE), e, 0.0)
    inside = tl.min(tl.where((tl.cumsum(e, 0) > point - before) & (e > 0.0), lanes, BLOCK), 0)
    inside = tl.minimum(inside, tl.max(tl.where(e > 0.0, lanes, 0), 0))
    lane = tl.where(greedy, tl.argmax(x, 0), inside)
    value = tl.sum(tl.where(lanes == lane, x, 0.0), 0)
    token = tl.minimum(block * BLOCK + lane, V - 1)  # NaN logits: any id
    tl.store(ids_ptr + row, token)
    tl.store(logprobs_ptr + row, value - lse)
    if slot != dummy:
        tl.store(tokens_ptr + slot, token.to(tl.int64))
        tl.store(place_ptr + slot, position)


class SlotRules:
    """The sampling rules of each slot, on the device, [slots] each."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self.temperature = torch.zeros(slots, dtype=torch.float32, device=device)
        self.seeds = torch.zeros(slots, dtype=torch.int64, device=device)
        self.top_k = torch.zeros(slots, dtype=torch.int32, device=device)
        self.top_p = torch.ones(slots, dtype=torch.float32, device=device)
        self.min_p = torch.zeros(slots, dtype=torch.float32, device=device)


def _blocks(vocab: int) -> dict[str, int]:
    """The size of the blocks of a vocabulary, and their number rounded up to a power of two."""
    block = 4096 if vocab > 4096 else triton.next_power_of_2(vocab)
    return {"BLOCK": block, "BLOCKS": triton.next_power_of_2(triton.cdiv(vocab, block))}


def block_sums(logits: Tensor, slots: Tensor, rules: SlotRules) -> tuple[Tensor, Tensor]:
    """See `_sums`: for every row and block, [rows, blocks] each."""
    (rows, vocab), sizes = logits.shape, _blocks(logits.shape[1])
    tops, masses = (torch.empty(rows, sizes["BLOCKS"], device=logits.device) for _ in range(2))
    programs = (rows, triton.cdiv(vocab, sizes["BLOCK"]))
    _sums[programs](logits, slots, rules.temperature, tops, masses, vocab, num_warps=4, **sizes)
    return tops, masses


def draw(
    logits: Tensor,
    sums: tuple[Tensor, Tensor],
    slots: Tensor,
    positions: Tensor,
    rules: SlotRules,
    tokens: Tensor,
    place: Tensor,
    cuts: bool,
) -> Tensor:
    """Draw an id per row by these sums of blocks; `cuts`: some rows cut their distribution. See `sample`."""
    rows, vocab = logits.shape
    drawn = torch.empty(2, rows + -rows % 4, dtype=torch.int32, device=logits.device)
    _sample[(rows,)](
        logits, *sums, slots, positions, rules.temperature, rules.seeds, rules.top_k, rules.top_p, rules.min_p,
        tokens, place, drawn[0], drawn[1].view(torch.float32), len(tokens) - 1, vocab,
        CUTS=cuts, WIDE=logits.dtype == torch.float32, num_warps=8, **_blocks(vocab),
    )  # fmt: skip
    return drawn


def sample(
    logits: Tensor, slots: Tensor, positions: Tensor, rules: SlotRules, tokens: Tensor, place: Tensor, cuts: bool
) -> Tensor:
    """Sample an id for each row, and advance its slot by it (`tokens`, `place`); the dummy slot stays.

    The result is int32 [2, rows rounded up to 4]: ids, and the bits of float32 log-probabilities, so that one copy
    brings both to the host. Rows are padded to 16 bytes, because Triton compiles again for pointers of less alignment.
    """
    return draw(logits, block_sums(logits, slots, rules), slots, positions, rules, tokens, place, cuts)
