"""Long contexts on one GPU: the library's attention against our kernels and PyTorch's flash, sampling and learning.

    python benchmarks/long.py                                # attention, sampling (8B), learning (1.1B, 8B with LoRA)
    python benchmarks/long.py --parts attention learn --shapes 1.1b --lengths 8192
    python benchmarks/long.py --tiny                         # CPU, in seconds: shows that it runs

Every figure stands beside the one of the path that it replaces, in the same process; random weights, bfloat16.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import generate, learn
from upshot.config.recipe import TrainConfig
from upshot.engine.engine import Engine, EngineSettings
from upshot.engine.kernels import long
from upshot.models.tiny import tiny_tokenizer
from upshot.training.learner.batch import Datum
from upshot.training.learner.forward import attention
from upshot.training.learner.forward.attention import Flash, LongSegments, PackedAttention
from upshot.training.learner.forward.select import set_checkpointing
from upshot.training.learner.layout import end_to_end
from upshot.training.learner.learner import Learner

WORK = {"4 x 32,768 -> 16": (4, 32768, 16), "64 x 8,192 -> 128": (64, 8192, 128)}
NEVER = 1 << 40
"""Longer than any run: the library's attention is off."""


def seconds(work: Callable[[], Any], repeats: int = 5) -> float:
    """Of the best of some calls, after one that does not count."""
    best = float("inf")
    for number in range(repeats + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        if number:
            best = min(best, time.perf_counter() - began)
    return best


def attention_rates(lengths: list[int], device: torch.device) -> None:
    """TFLOP/s of one layer's causal attention, 32 heads of 128 (8 of keys): flash and cuDNN, there and back."""
    print(f"{'ids':>7} {'flash':>7} {'cuDNN':>7}   back: {'flash':>7} {'cuDNN':>7}   first call of a shape, ms")
    for ids in lengths:
        shapes = ((ids, 32, 128), (ids, 8, 128), (ids, 8, 128))
        q, k, v = (torch.randn(s, device=device, dtype=torch.bfloat16, requires_grad=True) for s in shapes)
        spans = PackedAttention(end_to_end([ids]), device)
        grad, work = torch.randn_like(q), 2.0 * ids * ids * 32 * 128
        began = time.perf_counter()
        long.long_attention(q.detach(), k.detach(), v.detach(), 0.1)
        torch.cuda.synchronize()
        first = time.perf_counter() - began
        rates = []
        for call in (
            lambda q=q, k=k, v=v, spans=spans: Flash.apply(q, k, v, spans, 0.1, 0, 0.0),
            lambda q=q, k=k, v=v, spans=spans: LongSegments.apply(q, k, v, spans, 0.1),
        ):
            forward = seconds(call)
            out = call()
            back = seconds(
                lambda out=out, q=q, k=k, v=v, grad=grad: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)
            )
            rates.append((work / forward / 1e12, 2.5 * work / back / 1e12))
        (a, c), (b, d) = rates
        print(f"{ids:7} {a:7.0f} {b:7.0f}         {c:7.0f} {d:7.0f}   {1000 * first:.0f}", flush=True)


def sampling(shape: str, work: dict[str, tuple[int, int, int]], device: torch.device, settings: dict[str, Any]) -> None:
    """Seconds of whole requests, with our prefill kernel and with the library's."""
    model = generate.build(shape, device)
    model.config.max_position_embeddings = 1 << 16
    engine = Engine(model, eos_ids=set(), settings=EngineSettings(**settings))
    library = getattr(engine.runner, "long_run", 0)
    for title, size in work.items():
        taken = {}
        for name, threshold in (("ours", NEVER), ("library", library)):
            engine.runner.long_run = threshold
            runs = []
            for repeat in range(2):
                engine.weights_changed()
                began = time.perf_counter()
                generate.batch_work(*size)(engine, random.Random(repeat))
                runs.append(time.perf_counter() - began)
            taken[name] = min(runs)
        ratio = taken["ours"] / taken["library"]
        print(
            f"{shape} {settings} {title}: {taken['ours']:.2f} s, library {taken['library']:.2f} s ({ratio:.2f})",
            flush=True,
        )
    del engine, model


def learning(shape: str, lengths: list[int], device: torch.device, again: Any) -> None:
    """Tokens learned per second and peak memory: one sequence a micro-batch, two a step."""
    module = learn.build(shape, device)
    module.config.max_position_embeddings = 1 << 17
    set_checkpointing(module, again)
    for ids in lengths:
        rng = random.Random(0)
        data = []
        for _ in range(2):
            tokens = [rng.randrange(7, learn.SHAPES[shape]["vocab"]) for _ in range(ids)]
            mask = [0] * (ids // 2) + [1] * (ids - ids // 2)
            data.append(Datum(tokens, mask, [0.0] * ids, [rng.gauss(0, 1)] * ids))
        config = TrainConfig(lr=1e-30, token_budget=ids, length_norm="sequence")
        learner = Learner(module, tiny_tokenizer([f"w{n}" for n in range(64)]), config)
        for name, threshold in (("flash", NEVER), ("library", long.SHORTEST)):
            attention.SHORTEST = threshold
            row = learn.measure(learn.ours(learner, data), 2, device)
            print(
                f"{shape} {ids:6} ids, recomputed: {again:5}, {name:8}: {2 * ids / row['best_s']:8.0f} tokens/s, "
                f"peak {row['peak_gb']:6.1f} GB, loss {row['loss']:+.5f}, gradient {row['grad_norm']:.5f}",
                flush=True,
            )
        attention.SHORTEST = long.SHORTEST
        learner.optimizer.zero_grad()
        del learner
        gc.collect()


def main() -> int:
    """Run and print; a part that fails does not cost the others their turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="*", default=["attention", "sample", "learn"])
    parser.add_argument("--shapes", nargs="*", default=["1.1b", "8b"])
    parser.add_argument("--lengths", nargs="*", type=int, default=[2048, 8192, 32768])
    parser.add_argument("--eight", action="store_true", help="weights, keys and values in 8 bits, too")
    parser.add_argument("--again", nargs="*", default=["none", "block"], help="what an 8B computes again")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.tiny:
        learning("tiny", [64, 128], device, "none")
        sampling("quickstart", {"2 x 300 -> 4": (2, 300, 4)}, device, {})
        return 0
    room = {"kv_bytes": 90 << 30}
    jobs: list[Callable[[], None]] = []
    if "attention" in args.parts:
        jobs.append(lambda: attention_rates(args.lengths, device))
    if "sample" in args.parts and "8b" in args.shapes:
        jobs.append(lambda: sampling("8b", WORK, device, room))
        if args.eight:
            jobs.append(lambda: sampling("8b", WORK, device, {**room, "weights": "fp8", "kv": "fp8"}))
    if "learn" in args.parts:
        for shape in args.shapes:
            for again in args.again if shape == "8b" else ["none"]:
                jobs.append(lambda shape=shape, again=again: learning(shape, args.lengths, device, again))
    for job in jobs:
        try:
            job()
        except Exception:
            traceback.print_exc()
        gc.collect()
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
