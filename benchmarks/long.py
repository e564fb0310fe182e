"""Long contexts on one GPU: cuDNN's attention compared with our kernels and PyTorch's flash, sampling and learning.

    python benchmarks/long.py                                # attention, sampling, learning, growth (1.1B, 8B)
    python benchmarks/long.py --parts learn --shapes 8b --lengths 32768 --again mlp --alone
    python benchmarks/long.py --parts sample grow --eight    # weights, keys and values in 8 bits
    python benchmarks/long.py --parts sample --shapes 8b --vllm          # and --eight: the ratio to vLLM
    python benchmarks/long.py --parts profile --shapes 8b    # which kernels take the time of the sampling rows
    python benchmarks/long.py --tiny                         # CPU, in seconds: shows that it runs

Every figure is shown beside that of the path that it replaces, in the same process; random weights, bfloat16.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import generate, learn
from upshot.config.recipe import Recipe, TrainConfig
from upshot.engine.engine import Engine, EngineSettings
from upshot.engine.kernels import long
from upshot.engine.kernels.plain import AttentionOptions
from upshot.models.tiny import tiny_tokenizer
from upshot.training.adapters import PROJECTIONS
from upshot.training.learner.batch import Datum, end_to_end
from upshot.training.learner.forward import attention
from upshot.training.learner.forward.attention import Flash, LongSegments, PackedAttention
from upshot.training.learner.forward.select import set_checkpointing
from upshot.training.learner.learner import Learner
from upshot.training.learner.memory.plan import MemoryJob, MemorySetting, make_plan
from upshot.training.learner.memory.shape import ModelShape

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
            lambda q=q, k=k, v=v, spans=spans: Flash.apply(q, k, v, spans, AttentionOptions(0.1)),
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
    """Seconds of whole requests, with our prefill kernel (unless `alone`) and with the library's; vLLM's."""
    alone, peer = settings.pop("alone", False), settings.pop("vllm", False)
    theirs = vllm_seconds("weights" in settings) if peer else {}
    engine = engine_of(shape, device, settings)
    library = getattr(engine.runner, "long_run", 0)
    for title, size in work.items():
        taken = {}
        for name, threshold in (("ours", NEVER), ("library", library))[alone:]:
            engine.runner.long_run = threshold
            engine.weights_changed()  # nothing is read from the cache
            taken[name] = generate.measure(engine, generate.batch_work(*size), 1)[0]
        ratio = "" if alone else f", ours {taken['ours']:.2f} s ({taken['ours'] / taken['library']:.2f})"
        if title in theirs:
            ratio += f", vLLM {theirs[title]:.2f} s ({theirs[title] / taken['library']:.2f} x)"
        print(f"{shape} {settings} {title}: library {taken['library']:.2f} s{ratio}", flush=True)


def profile(shape: str, work: dict[str, tuple[int, int, int]], device: torch.device, settings: dict[str, Any]) -> None:
    """Where the GPU's time goes in each row of work: kernels by their sum, and what no kernel accounts for."""
    settings.pop("alone", False)
    engine = engine_of(shape, device, settings)
    for title, size in work.items():
        generate.measure(engine, generate.batch_work(1, min(size[1], 8192), 2), 1)
        engine.weights_changed()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
            began = time.perf_counter()
            generate.batch_work(*size)(engine, random.Random(1))
            torch.cuda.synchronize()
            taken = time.perf_counter() - began
        rows = sorted(found.key_averages(), key=lambda row: -row.self_device_time_total)
        total = sum(row.self_device_time_total for row in rows) / 1e6
        print(f"{shape} {settings} {title}: {taken:.2f} s, kernels {total:.2f} s", flush=True)
        for row in rows[:22]:
            print(f"  {row.self_device_time_total / 1e3:9.1f} ms {row.count:7} x  {row.key[:110]}", flush=True)


def vllm_seconds(eight: bool) -> dict[str, float]:
    """vLLM's time for each row of WORK, in a process of its own; the best of its rounds."""
    command = [sys.executable, str(Path(__file__).with_name("vllm_generate.py")), "--rows", *WORK, "--repeats", "1"]
    command += ["--weights", "fp8", "--kv", "fp8"] if eight else []
    taken: dict[str, float] = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            if line.startswith("{"):
                row = json.loads(line)
                taken[row["row"]] = min(row["seconds"], taken.get(row["row"], float("inf")))
    return taken


def engine_of(shape: str, device: torch.device, settings: dict[str, Any]) -> Engine:
    """An engine on a new model that takes long sequences."""
    model = generate.build(shape, device)
    model.config.max_position_embeddings = 1 << 17
    return Engine(model, eos_ids=set(), settings=EngineSettings(**settings))


def sampling_growth(shape: str, lengths: list[int], device: torch.device, settings: dict[str, Any]) -> None:
    """Prompts of 131,072 ids together at each length: ids read per second, ids sampled per second, peak memory."""
    total, new = (131072, 128) if device.type == "cuda" else (256, 4)
    engine = engine_of(shape, device, settings)
    each = 2 * engine.shape.layers * engine.shape.kv_heads * engine.shape.head_dim
    each *= 1 if settings.get("kv") == "fp8" else engine.shape.dtype.itemsize
    for ids in lengths:
        rows = max(total // ids, 1)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        seconds_of = {}
        for count in (1, new + 1):
            engine.weights_changed()  # nothing is read from the cache
            seconds_of[count] = generate.measure(engine, generate.batch_work(rows, ids, count), 1)[0]
        read, sampled = seconds_of[1], max(seconds_of[new + 1] - seconds_of[1], 1e-9)
        used = rows * (ids + new + 1) * each
        peak = torch.cuda.max_memory_allocated() - settings["kv_bytes"] + used if device.type == "cuda" else used
        print(
            f"{shape} {settings} {rows:3} x {ids:6} ids: read {rows * ids / read:9.0f} tokens/s, sample "
            f"{rows * new / sampled:7.0f} tokens/s, peak {peak / 1e9:6.1f} GB with keys and values of "
            f"these ids",
            flush=True,
        )


def predicted(shape: str, module: Any, ids: int, again: Any, layers: int | None) -> float:
    """GB that the memory plan expects while the learner reads a micro-batch of `ids` tokens."""
    model: dict[str, Any] = {"gradient_checkpointing": again}
    if rank := learn.SHAPES[shape].get("lora"):
        model["lora"] = {"r": rank, "alpha": 16, "targets": list(PROJECTIONS), "dropout": 0.0}
    recipe = Recipe.model_validate({"task": "slots", "model": model, "train": {"method": "sft", "token_budget": ids}})
    size = module.get_input_embeddings().weight.element_size()
    job = MemoryJob(recipe, ModelShape(module.config), size)
    return make_plan(job, MemorySetting(ids, again, layers), 0).learning / 1e9


def learning(
    shape: str, lengths: list[int], device: torch.device, again: list[str], ways: tuple[str, ...], total: int
) -> None:
    """Tokens learned a second and peak memory beside the plan's; one sequence a micro-batch, `total` tokens a step."""
    module = learn.build(shape, device)
    module.config.max_position_embeddings = 1 << 17
    for each in again:
        learning_again(shape, module, lengths, device, each, ways, total)


def learning_again(
    shape: str, module: Any, lengths: list[int], device: torch.device, again: Any, ways: tuple[str, ...], total: int
) -> None:
    """With `again` recomputed: none, mlp, block, or one of them and the number of layers, such as mlp:20."""
    kind, _, layers = again.partition(":")
    count = int(layers) if layers else None
    set_checkpointing(module, kind, count)
    tokenizer = tiny_tokenizer([f"w{n}" for n in range(64)])
    for ids in lengths:
        rng, data = random.Random(0), []
        for _ in range(max(total // ids, 1) if device.type == "cuda" else 2):
            tokens = [rng.randrange(7, learn.SHAPES[shape]["vocab"]) for _ in range(ids)]
            mask = [0] * (ids // 2) + [1] * (ids - ids // 2)
            data.append(Datum(tokens, mask, [0.0] * ids, [rng.gauss(0, 1)] * ids))
        learner = Learner(module, tokenizer, TrainConfig(lr=1e-30, token_budget=ids, length_norm="sequence"))
        for name in ways:
            attention.SHORTEST = NEVER if name == "flash" else long.SHORTEST
            row = learn.measure(learn.ours(learner, data), 1, device)
            plan = predicted(shape, module, ids, kind, count)
            print(
                f"{shape} {ids:6} ids, recomputed: {again:5}, {name:8}: {len(data) * ids / row['best_s']:8.0f} "
                f"tokens/s, peak {row['peak_gb']:6.1f} GB, planned {plan:6.1f} GB "
                f"({plan / max(row['peak_gb'], 1e-9) - 1:+.1%}), loss {row['loss']:+.5f}, "
                f"gradient {row['grad_norm']:.3g}",
                flush=True,
            )
        attention.SHORTEST = long.SHORTEST
        learner.optimizer.zero_grad()
        del learner
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def main() -> int:
    """Run and print; a part that fails does not cost the others their turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="*", default=["attention", "sample", "learn", "grow"])
    parser.add_argument("--shapes", nargs="*", default=["1.1b", "8b"])
    parser.add_argument("--lengths", nargs="*", type=int, default=[2048, 8192, 32768, 65536])
    parser.add_argument("--eight", action="store_true", help="weights, keys and values in 8 bits instead")
    parser.add_argument("--alone", action="store_true", help="without the paths that the library's replaces")
    parser.add_argument(
        "--again", nargs="*", default=["none", "mlp"], help="what an 8B computes again; mlp:20: in 20 layers"
    )
    parser.add_argument("--total", type=int, default=65536, help="tokens of a step of learning")
    parser.add_argument("--vllm", action="store_true", help="vLLM on the sampling rows first; only the library's path")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ways = ("library",) if args.alone else ("flash", "library")
    if args.tiny:
        learning("tiny", [64, 128], device, ["none", "mlp", "mlp:1"], ways, 256)
        sampling("quickstart", {"2 x 300 -> 4": (2, 300, 4)}, device, {})
        sampling_growth("quickstart", [64, 128], device, {})
        return 0
    room: dict[str, Any] = {"kv_bytes": 90 << 30, **({"weights": "fp8", "kv": "fp8"} if args.eight else {})}
    jobs: list[Callable[[], None]] = []
    if "attention" in args.parts:
        jobs.append(lambda: attention_rates(args.lengths, device))
    if "sample" in args.parts and "8b" in args.shapes:
        jobs.append(lambda: sampling("8b", WORK, device, {**room, "alone": args.alone or args.vllm, "vllm": args.vllm}))
    if "profile" in args.parts:
        jobs.append(lambda: profile("8b", WORK, device, dict(room)))
    for shape in args.shapes:
        if "learn" in args.parts:
            again = args.again if shape == "8b" else ["none"]
            jobs.append(lambda shape=shape, again=again: learning(shape, args.lengths, device, again, ways, args.total))
        if "grow" in args.parts:
            jobs.append(lambda shape=shape: sampling_growth(shape, args.lengths, device, room | {"kv_bytes": 40 << 30}))
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
