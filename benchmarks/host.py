"""What a step costs the host: the engine with the GPU's runner, but without a GPU.

    python benchmarks/host.py

Scheduling, bookkeeping, packing and results run as they do on a GPU; captured graphs and sampling do nothing, and ids
are made up. Measures CPU time of the one thread, so that other work on the machine matters little. Besides the device's
own work, pinned memory, launches and events are left out.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import pstats
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import upshot.engine.cuda.runner as cuda_runner
from benchmarks.generate import Work, batch_work, collab_work
from upshot.engine.cuda.steps import Graph, PromptGraph
from upshot.engine.engine import Engine, EngineSettings

VOCAB = 4096


class Nothing:
    """A captured graph that does nothing."""

    def replay(self) -> None:
        """Do nothing."""


class HostRunner(cuda_runner.CudaRunner):
    """The GPU's runner without its device work."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.use_graphs, self.graphed = True, self.driver

    def _capture(self, bucket: int, shared: bool, cuts: bool) -> Graph:
        drawn = torch.randint(3, VOCAB, (2, bucket), dtype=torch.int32)
        return Graph(Nothing(), drawn, torch.zeros(1, 1))  # type: ignore[arg-type]

    def _capture_prompt(self, size: int, rows: int, room: int) -> PromptGraph:
        tokens = torch.zeros(3, size, dtype=torch.int64)
        blocks, last = torch.zeros(4, room, dtype=torch.int32), torch.zeros(rows, dtype=torch.int64)
        return PromptGraph(Nothing(), tokens, blocks, last, torch.zeros(rows, 1))  # type: ignore[arg-type]


def host_engine() -> Engine:
    """An engine whose steps cost host time only."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=4,
        intermediate_size=4,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=2048,
    )
    cuda_runner.CudaRunner = HostRunner  # type: ignore[misc]
    cuda_runner.sample_kernels.sample = lambda logits, *_: torch.randint(  # type: ignore[assignment]
        3, VOCAB, (2, len(logits)), dtype=torch.int32
    )
    settings = EngineSettings(
        kernels=True, check=False, lean=False, max_running=1024, chunk_tokens=16384, kv_bytes=1 << 28
    )
    return Engine(LlamaForCausalLM(config).eval(), eos_ids={2}, settings=settings)


class Clock:
    """Times every step of an engine by its kind."""

    def __init__(self, engine: Engine) -> None:
        self.seconds: dict[str, list[float]] = {"decode": [], "chunk": []}
        self._run = engine.runner.run
        self._step = engine.step
        self._kind = "decode"
        engine.runner.run = self.run
        engine.step = self.step  # type: ignore[method-assign]

    def run(self, plan: Any) -> Any:
        """Note what kind of step it is."""
        self._kind = "chunk" if plan.chunks else "decode"
        return self._run(plan)

    def step(self) -> bool:
        """One step, timed."""
        began = time.thread_time()
        more = self._step()
        self.seconds[self._kind].append(time.thread_time() - began)
        return more


def measure(title: str, work: Work, repeats: int) -> dict[str, Any]:
    """Median CPU µs of decode and chunk steps in the best run, and the CPU seconds of all steps and of the work."""
    engine = host_engine()
    best: dict[str, Any] = {}
    for attempt in range(repeats + 1):
        clock = Clock(engine)
        gc.collect()
        began = time.thread_time()
        work(engine, random.Random(attempt))
        whole = time.thread_time() - began
        engine.runner.run, engine.step = clock._run, clock._step  # type: ignore[method-assign]
        inside = sum(map(sum, clock.seconds.values()))
        if attempt and (not best or inside < best["steps_s"]):
            best = {"work": title, "whole_s": round(whole, 4), "steps_s": round(inside, 4)}
            for kind, times in clock.seconds.items():
                middle = 1e6 * statistics.median(times)
                best |= {f"{kind}_steps": len(times), f"{kind}_us": round(middle, 1)}
    return best


WORKS: dict[str, Work] = {
    "256 prompts": batch_work(256, 256, 256),
    "1024 prompts": batch_work(1024, 256, 256),
    "CollabLLM": collab_work(16, 512, 8, 256, 3, 2, 32, 128),
}


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="*", default=list(WORKS), choices=list(WORKS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for title in args.rows:
        if args.profile:
            engine, profile = host_engine(), cProfile.Profile()
            profile.runcall(WORKS[title], engine, random.Random(0))
            pstats.Stats(profile).sort_stats("tottime").print_stats(22)
        print(json.dumps(measure(title, WORKS[title], args.repeats)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
