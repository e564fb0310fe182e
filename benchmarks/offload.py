"""The MLPs' up-projections kept on the host instead of recomputed: tokens learned per second and peak memory of both.

    python benchmarks/offload.py                   # GPU: 8B with LoRA, one sequence of 32,768 tokens
    python benchmarks/offload.py --shape tiny --length 64 --counts 1    # CPU: shows that it runs

In `--counts` layers, spread evenly, the up-projection's result is copied to pinned memory while the next layers are
computed, and back while the backward is in the layer above. For comparison, the same number of layers is recomputed.
An experiment: the learner does not do this (docs/dev/performance-2026-11.md).
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import learn
from upshot.config.recipe import TrainConfig
from upshot.models.tiny import tiny_tokenizer
from upshot.training.learner.batch import Datum
from upshot.training.learner.forward.lean import Block
from upshot.training.learner.forward.select import set_checkpointing
from upshot.training.learner.learner import Learner

AHEAD = 2
"""Layers whose way up may still be on its way to the host while another one is computed."""


class HostMemory:
    """What some layers keep, in pinned memory."""

    def __init__(self, layers: list[int], device: torch.device) -> None:
        self.layers, self.cuda = layers, device.type == "cuda"
        self.stream: Any = torch.cuda.Stream(device) if self.cuda else None
        self.host: dict[int, Tensor] = {}
        self.leaving: list[tuple[Tensor, Any]] = []
        self.back: dict[int, tuple[Tensor, Any]] = {}

    def put(self, layer: int, x: Tensor) -> None:
        """Begin to copy; the device's memory is released once an earlier copy is done."""
        if layer not in self.host:
            self.host[layer] = torch.empty(x.shape, dtype=x.dtype, pin_memory=self.cuda)
        if not self.cuda:
            self.host[layer].copy_(x)
            return
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            self.host[layer].copy_(x, non_blocking=True)
            self.leaving.append((x, self.stream.record_event()))
        while len(self.leaving) > AHEAD:
            _, done = self.leaving.pop(0)
            done.synchronize()

    def fetch(self, layer: int, like: Tensor) -> None:
        """Begin to copy back."""
        self.leaving.clear()  # the forward is over; what is copied is kept by the stream's order
        x = torch.empty(self.host[layer].shape, dtype=like.dtype, device=like.device)
        if not self.cuda:
            self.back[layer] = (x.copy_(self.host[layer]), None)
            return
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            x.copy_(self.host[layer], non_blocking=True)
            self.back[layer] = (x, self.stream.record_event())

    def take(self, layer: int, like: Tensor) -> Tensor:
        """What was kept for a layer."""
        if layer not in self.back:
            self.fetch(layer, like)
        x, done = self.back.pop(layer)
        if done is not None:
            torch.cuda.current_stream().wait_event(done)
        return x


@contextmanager
def offloaded(memory: HostMemory) -> Iterator[None]:
    """Inside this context, blocks keep their up-projection on the host where the memory says so."""
    forward, backward, way_up = Block.forward, Block.backward, Block._way_up

    def own_forward(self: Block, *args: Any, **more: Any) -> Any:
        h, delta, kept = forward(self, *args, **more)
        if kept is not None and self.index in memory.layers:
            assert kept.gate_up is not None
            memory.put(self.index, kept.gate_up)
            kept.gate_up = None
        return h, delta, kept

    def own_backward(self: Block, batch: Any, kept: Any, d: Tensor, further: bool) -> Any:
        below = max((layer for layer in memory.layers if layer < self.index), default=None)
        if below is not None and below not in memory.back:
            memory.fetch(below, d)
        return backward(self, batch, kept, d, further)

    def own_way_up(self: Block, batch: Any, kept: Any) -> Tensor:
        return memory.take(self.index, kept.second) if self.index in memory.layers else way_up(self, batch, kept)

    Block.forward, Block.backward, Block._way_up = own_forward, own_backward, own_way_up  # type: ignore[method-assign]
    try:
        yield
    finally:
        Block.forward, Block.backward, Block._way_up = forward, backward, way_up  # type: ignore[method-assign]


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="8b")
    parser.add_argument("--length", type=int, default=32768)
    parser.add_argument("--counts", nargs="*", type=int, default=[20])
    parser.add_argument("--again", action="store_true", help="the same counts computed again, too")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    module = learn.build(args.shape, device)
    module.config.max_position_embeddings = 1 << 17
    depth, rng = learn.SHAPES[args.shape]["layers"], random.Random(0)
    tokens = [rng.randrange(7, learn.SHAPES[args.shape]["vocab"]) for _ in range(args.length)]
    mask = [0] * (args.length // 2) + [1] * (args.length - args.length // 2)
    data = [Datum(tokens, mask, [0.0] * args.length, [1.0] * args.length)]
    config = TrainConfig(lr=1e-30, token_budget=args.length, length_norm="sequence")

    def measure(title: str, memory: HostMemory | None = None) -> None:
        # Made before anything is offloaded: it tries its forward on short sequences.
        learner = Learner(module, tiny_tokenizer([f"w{n}" for n in range(64)]), config)
        with offloaded(memory) if memory else nullcontext():
            row = learn.measure(learn.ours(learner, data), 1, device)
        print(
            f"{args.shape} {args.length} {title}: {args.length / row['best_s']:8.0f} tokens/s, peak "
            f"{row['peak_gb']:6.1f} GB, first {row['first_s']:.1f} s, loss {row['loss']:+.5f}, "
            f"gradient {row['grad_norm']:.4g}",
            flush=True,
        )

    for count in args.counts:
        layers = sorted({layer * (depth - 1) // count for layer in range(count)})
        set_checkpointing(module, "none")
        measure(f"{len(layers)} layers on the host ", HostMemory(layers, device))
        if args.again:
            set_checkpointing(module, "mlp", count)
            measure(f"{count} layers computed again")
    return 0


if __name__ == "__main__":
    sys.exit(main())
