"""Attention of one decode step over pages, with a plan of what is read once and what is cut: µs per layer, on a GPU.

    python benchmarks/decode_attention.py                    # 8B's heads, bfloat16 and 8 bits
    python benchmarks/decode_attention.py --fill 3 6 9 12    # other numbers of pieces in flight

Each row of the table is a step: some prompts with replies and futures, or rows that share nothing. *whole*: one kernel
reads every row separately (rotary and store inside). *one level*: what all replies to a prompt share is read once.
*plan*: what is shared at any level is read once. Its time includes rotary and store, which it needs beforehand.
*floor*: the time to read the plan's bytes at 4.2 TB/s.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from upshot.engine import decode_plan
from upshot.engine.cuda.slots import BUCKETS
from upshot.engine.decode_plan import DecodeTiles, plan_reads
from upshot.engine.kernels.decode import DecodePlan, decode_attention, tiles_for
from upshot.engine.kernels.decode_fused import fused_decode_attention
from upshot.engine.kernels.fp8 import E4M3
from upshot.engine.kernels.plain import AttentionOptions
from upshot.engine.kernels.rotary import rotate_store
from upshot.engine.sequence import Rules, Sequence

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 16
Tree = tuple[int, int, int, int, int, int]
"""Prompts, their ids, replies to each, their ids, futures of each, ids of their own."""
STEPS: dict[str, Tree] = {
    "16 x 8 x 3, 512 + 146 + 250": (16, 512, 8, 146, 3, 250),
    "16 x 8, 512 + 73": (16, 512, 8, 0, 1, 73),
    "256 x 370": (256, 0, 1, 0, 1, 370),
    "64 x 8,192": (64, 0, 1, 0, 1, 8192),
    "32 x 2,048": (32, 0, 1, 0, 1, 2048),
    "16 x 8,192": (16, 0, 1, 0, 1, 8192),
    "4 x 32,768": (4, 0, 1, 0, 1, 32768),
    "2 x 65,536": (2, 0, 1, 0, 1, 65536),
    "1 x 4,096": (1, 0, 1, 0, 1, 4096),
    "1 x 512": (1, 0, 1, 0, 1, 512),
    "8 x 512": (8, 0, 1, 0, 1, 512),
    "24 x 512": (24, 0, 1, 0, 1, 512),
    "24 x 1,024": (24, 0, 1, 0, 1, 1024),
    "63 x 300 and 8,192": (-63, 0, 1, 0, 1, 300),
}


def rows_of(tree: Tree) -> list[Sequence]:
    """Sequences with their pages, and one id in the making."""
    prompts, prompt, replies, reply, futures, own = tree
    used, rows = 1, []

    def take(count: int) -> list[int]:
        nonlocal used
        used += count
        return list(range(used - count, used))

    for _ in range(abs(prompts)):
        shared = take(prompt // PAGE)
        for _ in range(replies):
            both = shared + take(reply // PAGE)
            for _ in range(futures):
                pages = both + take(-(-own // PAGE))
                rows.append(Sequence([0] * ((len(both) * PAGE) + own + 1), Rules(), pages=pages))
    if prompts < 0:
        rows.append(Sequence([0] * 8193, Rules(), pages=take(512)))
    return rows


def seconds(work: Callable[[int], object], layers: int) -> float:
    """Of one layer: a captured run over all of them (more than the cache holds), the best of some replays."""
    work(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(layers):
            work(layer)
    best = float("inf")
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        best = min(best, begin.elapsed_time(end) / 1000 / layers)
    return best


class Step:
    """One step's rows, keys and values of a few layers, and what attends to them."""

    def __init__(self, rows: list[Sequence], eight: bool, device: torch.device) -> None:
        self.rows, self.device = rows, device
        n_pages = max(max(s.pages) for s in rows) + 1
        each = 2 * n_pages * KV_HEADS * PAGE * DIM * (1 if eight else 2)
        self.layers = max(2, min(16, (1 << 30) // each))
        size = (self.layers, n_pages, KV_HEADS, PAGE, DIM)
        cache = [torch.empty(size, dtype=torch.bfloat16, device=device).normal_() for _ in range(2)]
        self.k, self.v = (x.to(E4M3) if eight else x for x in cache)
        most = max(len(s.pages) for s in rows)
        self.table = torch.zeros(len(rows) + 1, -(-most // 4) * 4, dtype=torch.int32, device=device)
        for slot, seq in enumerate(rows):
            self.table[slot, : len(seq.pages)] = torch.tensor(seq.pages, dtype=torch.int32)
        self.bucket = next(b for b in BUCKETS if b >= len(rows))
        self.slots = torch.full((self.bucket,), len(rows), dtype=torch.int32, device=device)
        self.slots[: len(rows)] = torch.arange(len(rows), dtype=torch.int32)
        self.lengths = torch.ones(self.bucket, dtype=torch.int32, device=device)
        self.lengths[: len(rows)] = torch.tensor([s.length - 1 for s in rows], dtype=torch.int32)
        width = (HEADS + 2 * KV_HEADS) * DIM
        self.qkv = torch.randn(self.bucket, width, dtype=torch.bfloat16, device=device)
        angles = torch.randn(int(self.lengths.max()) + 1, DIM // 2, device=device)
        self.cos, self.sin = angles.cos().bfloat16(), angles.sin().bfloat16()
        last = self.lengths.long() - 1
        self.positions = last
        self.cells = self.table[self.slots.long(), last // PAGE].long() * PAGE + last % PAGE
        self.options = AttentionOptions(DIM**-0.5)

    def whole(self, layer: int) -> torch.Tensor:
        """Every row by itself."""
        return fused_decode_attention(
            self.qkv, self.k[layer], self.v[layer], self.table, self.slots, self.lengths, self.cos, self.sin, HEADS,
            self.options,
        )  # fmt: skip

    def planned(self, tiles: DecodeTiles, levels: int, least: int) -> tuple[DecodePlan, int] | None:
        """The plan with this many levels, and the bytes of keys and values it reads."""
        decode_plan.LEVELS, decode_plan.LONG = levels, least
        reads = plan_reads(self.rows, PAGE, tiles)
        if reads is None:
            return None
        narrow, wide, parts = tiles.rooms(self.bucket)
        tables = []
        for table, room in zip((reads.narrow, reads.wide, reads.parts), (narrow, wide, self.bucket), strict=True):
            here = torch.zeros(room, max(table.shape[1], 1), dtype=torch.int32, device=self.device)
            here[: len(table)] = torch.from_numpy(table)
            tables.append(here)
        lengths = self.lengths.tolist()
        ids = sum(min(int(p[1]), lengths[int(p[3])]) - int(p[0]) for t in (reads.narrow, reads.wide) for p in t)
        size = ids * 2 * KV_HEADS * DIM * self.k.element_size()
        return DecodePlan(tables[0], tables[1] if len(reads.wide) else None, tables[2], parts), size

    def attend(self, plan: DecodePlan, layer: int) -> torch.Tensor:
        """Rotary and store, then the plan."""
        k, v = self.k[layer], self.v[layer]
        q = rotate_store(self.qkv, self.positions, self.cells, self.cos, self.sin, k, v, HEADS)
        return decode_attention(q, k, v, self.table, self.slots, self.lengths, self.options, plan)


def main() -> int:
    """Measure every step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fill", nargs="*", type=int, default=[6], help="pieces under way for each multiprocessor")
    parser.add_argument("--steps", nargs="*", default=list(STEPS))
    args = parser.parse_args()
    device = torch.device("cuda")
    for eight in (False, True):
        base = tiles_for(HEADS, KV_HEADS, DIM, torch.bfloat16, eight, device)
        names = " ".join(f"{'plan/' + str(f):>9}" for f in args.fill)
        print(f"{'fp8' if eight else 'bf16':28} {'whole':>9} {'one level':>9} {names}  floor, µs", flush=True)
        for name in args.steps:
            step = Step(rows_of(STEPS[name]), eight, device)
            best = [seconds(step.whole, step.layers)]
            reference, floor = step.whole(0)[: len(step.rows)].float(), 0.0
            for levels, fill in ((1, 6), *((3, fill) for fill in args.fill)):
                tiles = replace(base, fill=(base.fill[0] * fill // 6, base.fill[1]))
                planned = step.planned(tiles, levels, 0)
                if planned is None:
                    best.append(0.0)
                    continue
                plan, size = planned
                floor = size / 4.2e12
                out = step.attend(plan, 0)[: len(step.rows)].float()
                gap = float((out - reference).norm() / reference.norm())
                assert gap < 0.02, f"{name}: {gap}"
                best.append(seconds(lambda layer, p=plan, s=step: s.attend(p, layer), step.layers))
            print(f"{name:28} " + " ".join(f"{1e6 * s:9.1f}" for s in best) + f" {1e6 * floor:9.1f}", flush=True)
            del step
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
