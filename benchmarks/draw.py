"""What one row with top-p costs all rows of a step: the sampling kernels on a GPU, compared with torch's sort.

    python benchmarks/draw.py

Prints µs per draw if no row uses top-p, if one row does, and if every row does, with the ratio to the first. The peer
is a sort of the same logits, by which top-p is usually found.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def microseconds(rows: int, vocab: int, cutting: int) -> float:
    """A draw for `rows` rows, of which `cutting` ask for top-p."""
    from triton.testing import do_bench

    from upshot.engine.kernels.sample import SlotRules, sample

    device = torch.device("cuda")
    logits = torch.randn(rows, vocab, device=device, dtype=torch.bfloat16) * 3
    slots = torch.arange(rows, device=device, dtype=torch.int32)
    positions = torch.full((rows,), 7, device=device)
    rules = SlotRules(rows + 1, device)
    rules.temperature.fill_(1.0)
    rules.top_p[:cutting] = 0.9
    tokens = torch.zeros(rows + 1, dtype=torch.int64, device=device)
    place = torch.zeros(rows + 1, dtype=torch.int32, device=device)
    return 1000 * do_bench(
        lambda: sample(logits, slots, positions, rules, tokens, place, cutting > 0), return_mode="median"
    )


def sort_microseconds(rows: int, vocab: int) -> float:
    """A sort of the logits of every row."""
    from triton.testing import do_bench

    logits = torch.randn(rows, vocab, device="cuda", dtype=torch.bfloat16)
    return 1000 * do_bench(lambda: logits.sort(dim=-1, descending=True), return_mode="median")


def main() -> int:
    """Run and print."""
    if not torch.cuda.is_available():
        print("needs a GPU")
        return 2
    print(f"{'rows':>5} {'vocabulary':>10} {'nobody':>8} {'one row':>8} {'all':>8}  one / nobody   {'sort':>8}")
    for vocab in (49152, 151936):
        for rows in (16, 256, 1024):
            nobody, one, everybody = (microseconds(rows, vocab, cutting) for cutting in (0, 1, rows))
            peer = sort_microseconds(rows, vocab)
            print(
                f"{rows:5} {vocab:10} {nobody:8.1f} {one:8.1f} {everybody:8.1f}  {one / nobody:12.2f}   {peer:8.1f}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
