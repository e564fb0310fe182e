"""Tokens generated per second: the embedded engine against transformers' `generate`, end to end, random weights.

    python benchmarks/generate.py                          # GPU: SmolLM2-135M's shape and a 1.1B shape
    python benchmarks/generate.py --shapes quickstart 135m --scale 8   # CPU: fewer prompts
    python benchmarks/generate.py --shapes 8b --lora 32 --no-peer --rows 256 CollabLLM
    python benchmarks/generate.py --shapes 8b --weights fp8 --no-peer --rows 256 CollabLLM

With --lora the same work is done without adapters, with merged adapters and with adapters called as modules, in this
order; the last column is the share of the speed without adapters. With --weights fp8 every way to sample is run a
second time in 8 bits (except called adapters).

Prints a table and, for every row, how far the sampled log-probabilities are from a plain forward.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from upshot.engine.engine import Engine, EngineSettings
from upshot.engine.llama.shape import causal_lm
from upshot.engine.sequence import Rules, Sequence

SHAPES: dict[str, dict[str, int]] = {
    "quickstart": {"layers": 5, "hidden": 128, "heads": 4, "kv": 2, "mlp": 352, "vocab": 100},
    "135m": {"layers": 30, "hidden": 576, "heads": 9, "kv": 3, "mlp": 1536, "vocab": 49152},
    "1.1b": {"layers": 16, "hidden": 2048, "heads": 32, "kv": 8, "mlp": 8192, "vocab": 49152},
    "8b": {"layers": 32, "hidden": 4096, "heads": 32, "kv": 8, "mlp": 14336, "vocab": 128256, "tied": 0},
}
COLLAB = {"prompts": 16, "prompt": 512, "replies": 8, "reply": 256, "futures": 3, "rounds": 2, "given": 32, "new": 128}
"""CollabLLM's shape: what `collab_work` is given."""
SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTERS = ("without", "merged", "called")
Work = Callable[[Engine, random.Random], list[Sequence]]


def build(name: str, device: torch.device) -> LlamaForCausalLM:
    """A Llama of the shape with random weights (bf16 on a GPU, float32 on the CPU)."""
    shape = SHAPES[name]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=shape["vocab"],
        hidden_size=shape["hidden"],
        intermediate_size=shape["mlp"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv"],
        max_position_embeddings=2048,
        tie_word_embeddings=bool(shape.get("tied", 1)),
        initializer_range=0.04,
    )
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.set_default_dtype(dtype)  # an 8B in float32 first would need twice the memory
    try:
        with device:
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(torch.float32)
    return model.to(dtype).eval()


def with_lora(model: LlamaForCausalLM, rank: int, targets: list[str]) -> Any:
    """The model with adapters of about the size that training gives them."""
    import peft

    torch.manual_seed(1)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=rank, lora_alpha=rank // 2 or 1, target_modules=targets))
    with torch.no_grad():
        for name, weight in wrapped.named_parameters():
            if "lora_B" in name or "lora_embedding_A" in name:
                weight.normal_(std=0.002)
    return wrapped.eval()


def ids_of(rng: random.Random, vocab: int, n: int) -> list[int]:
    """Random ids."""
    return [rng.randrange(3, vocab) for _ in range(n)]


def batch_work(prompts: int, prompt: int, new: int) -> Work:
    """`prompts` prompts at once, all of the same length."""

    def work(engine: Engine, rng: random.Random) -> list[Sequence]:
        rows = [ids_of(rng, engine.shape.vocab, prompt) for _ in range(prompts)]
        start(engine)
        seqs = [engine.submit(ids, Rules(max_tokens=new, seed=i))[0] for i, ids in enumerate(rows)]
        engine.run_until_done()
        return seqs

    return work


def collab_work(
    prompts: int, prompt: int, replies: int, reply: int, futures: int, rounds: int, given: int, new: int
) -> Work:
    """CollabLLM's shape: replies to each prompt, each forked into futures of rounds of (given + new) ids."""

    def work(engine: Engine, rng: random.Random) -> list[Sequence]:
        done: list[Sequence] = []
        rows = [ids_of(rng, engine.shape.vocab, prompt) for _ in range(prompts)]
        said = [ids_of(rng, engine.shape.vocab, given) for _ in range(prompts * replies * futures * rounds)]

        def go_on(seq: Sequence, left: int) -> None:
            def finished(end: Sequence) -> None:
                done.append(end)
                if left > 1:
                    go_on(end, left - 1)

            ids = [*seq.ids, *said.pop()]
            engine.submit(ids, Rules(max_tokens=new, seed=len(said)), on_done=finished)

        def replied(seq: Sequence) -> None:
            done.append(seq)
            for _ in range(futures):
                go_on(seq, rounds)

        start(engine)
        for i, ids in enumerate(rows):
            engine.submit(ids, Rules(max_tokens=reply, seed=i), n=replies, on_done=replied)
        engine.run_until_done()
        return done

    return work


def collab_generate(
    model: Any,
    rng: random.Random,
    prompts: int,
    prompt: int,
    replies: int,
    reply: int,
    futures: int,
    rounds: int,
    given: int,
    new: int,
) -> int:
    """The same work by transformers' `generate`, everything of a round in one batch."""
    vocab = model.config.vocab_size
    ids = torch.tensor([ids_of(rng, vocab, prompt) for _ in range(prompts)]).repeat_interleave(replies, 0)
    ids = hf_generate(model, ids, reply)
    made = prompts * replies * reply
    ids = ids.repeat_interleave(futures, 0)
    for _ in range(rounds):
        ids = torch.cat([ids, torch.tensor([ids_of(rng, vocab, given) for _ in range(len(ids))])], 1)
        ids = hf_generate(model, ids, new)
        made += len(ids) * new
    return made


def hf_generate(model: Any, ids: torch.Tensor, new: int) -> torch.Tensor:
    """Sampled continuation of a batch by transformers."""
    options = {"do_sample": True, "top_k": 0, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": new}
    ids = ids.to(model.device)
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options).cpu()


_clock = [0.0]


def start(engine: Engine) -> None:
    """Inputs are made; the clock starts here."""
    if engine.on_gpu:
        torch.cuda.synchronize()
    _clock[0] = time.perf_counter()


def logprob_gaps(model: Any, seqs: list[Sequence], rows: int) -> tuple[float, float]:
    """Largest and mean difference between sampled log-probabilities and a plain forward."""
    worst, total, count = 0.0, 0.0, 0
    model = causal_lm(model)
    by_length: dict[int, list[Sequence]] = {}
    for seq in seqs:
        by_length.setdefault(len(seq.ids), []).append(seq)
    for group in by_length.values():
        for at in range(0, len(group), rows):
            part = group[at : at + rows]
            ids = torch.tensor([s.ids for s in part], device=model.device)
            first = min(s.prompt_len for s in part)
            with torch.inference_mode():
                hidden = model.model(input_ids=ids).last_hidden_state[:, first - 1 : -1]
                logprobs = model.lm_head(hidden).float().log_softmax(-1).gather(-1, ids[:, first:, None])[..., 0].cpu()
            for row, seq in zip(logprobs, part, strict=True):
                gap = (row[seq.prompt_len - first :] - torch.tensor(seq.logprobs)).abs()
                worst, total, count = max(worst, float(gap.max())), total + float(gap.sum()), count + len(gap)
    return worst, total / max(1, count)


def measure(engine: Engine, work: Work, repeats: int) -> tuple[float, list[Sequence], int]:
    """Best wall time of `repeats` runs after one that warms up (graphs, kernels); the last run's sequences."""
    best = float("inf")
    seqs: list[Sequence] = []
    steps = 0
    for i in range(repeats + 1):
        before = engine.steps
        seqs = work(engine, random.Random(i))
        if engine.on_gpu:
            torch.cuda.synchronize()
        wall = time.perf_counter() - _clock[0]
        steps = engine.steps - before
        if i:
            best = min(best, wall)
    return best, seqs, steps


def ceilings(device: torch.device) -> dict[str, float]:
    """Measured copy bandwidth (TB/s) and bf16 matrix rate (TFLOP/s)."""
    from triton.testing import do_bench

    a = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    b = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    big = torch.empty(1 << 31, device=device, dtype=torch.bfloat16)
    half = len(big) // 2
    copy = do_bench(lambda: big[:half].copy_(big[half:]), return_mode="median")
    product = do_bench(lambda: a @ b, return_mode="median")
    return {"copy_TBps": half * 2 * 2 / copy / 1e9, "matmul_TFLOPs": 2 * 8192**3 / product / 1e9}


def prefill_rate(engine: Engine, tokens: int, prompt: int) -> tuple[float, float]:
    """Prompt ids read per second and the TFLOP/s of it."""
    shape = SHAPES_OF[id(engine)]
    best = float("inf")
    for i in range(3):
        rng = random.Random(100 + i)
        rows = [ids_of(rng, engine.shape.vocab, prompt) for _ in range(tokens // prompt)]
        start(engine)
        for ids in rows:
            engine.submit(ids, Rules(max_tokens=1))
        engine.run_until_done()
        best = min(best, time.perf_counter() - _clock[0])
    hidden, head = shape["hidden"], shape["hidden"] // shape["heads"]
    weights = shape["layers"] * (hidden * head * (2 * shape["heads"] + 2 * shape["kv"]) + 3 * hidden * shape["mlp"])
    attention = shape["layers"] * 4 * shape["heads"] * head * prompt / 2
    return tokens / best, tokens * (2 * weights + attention) / best / 1e12


SHAPES_OF: dict[int, dict[str, int]] = {}


def run_shape(name: str, args: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """All rows of one shape, with and without adapters where --lora asks for them."""
    model: Any = build(name, device)
    table: list[dict[str, Any]] = []
    for adapters in ADAPTERS if args.lora else ADAPTERS[:1]:
        if adapters == "merged":
            model = with_lora(model, args.lora, args.targets)
        for weights in dict.fromkeys(("model", args.weights)):
            if adapters != "called" or weights == "model":
                table += run_engine(name, model, adapters, weights, args, device)
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    if args.weights == "fp8" and device.type == "cuda":
        print(json.dumps({"shape": name, **frozen_memory(model)}), flush=True)
    return table


def frozen_memory(model: Any) -> dict[str, float]:
    """GB of a model that nobody trains, as it is and with its projections in 8 bits, which it keeps."""
    from upshot.engine.llama.eight_bit import narrow_projections

    def now() -> float:
        gc.collect()
        return torch.cuda.memory_allocated() / 1e9

    before = now()
    narrow_projections(model)
    return {"frozen_GB": before, "frozen_fp8_GB": now()}


def refresh_seconds(engine: Engine) -> float:
    """How long the engine takes to take over new weights."""
    best = float("inf")
    for _ in range(3):
        start(engine)
        engine.weights_changed()
        if engine.on_gpu:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - _clock[0])
    return best


def run_engine(
    name: str, model: Any, adapters: str, weights: str, args: argparse.Namespace, device: torch.device
) -> list[dict[str, Any]]:
    """All rows of one shape and one way to sample from it."""
    scale = args.scale
    began = time.perf_counter()
    settings = EngineSettings(
        kv_bytes=args.kv_bytes,
        lean=not args.plain,
        merge="never" if adapters == "called" else "copy",
        weights=weights,
        kv=args.kv if weights == args.weights else "model",
    )
    engine = Engine(model, eos_ids=set(), settings=settings)
    engine.submit([5, 6, 7], Rules(max_tokens=2))
    engine.run_until_done()
    first = time.perf_counter() - began
    refresh = refresh_seconds(engine)
    SHAPES_OF[id(engine)] = SHAPES[name]
    collab = COLLAB | {"prompts": max(1, COLLAB["prompts"] // scale)}
    rows: list[tuple[str, Work]] = [
        ("256 prompts", batch_work(256 // scale, 256, 256)),
        ("1024 prompts", batch_work(1024 // scale, 256, 256)),
        ("CollabLLM", collab_work(**collab)),
    ]
    table = []
    for title, work in rows:
        if args.rows and not any(title.startswith(r) for r in args.rows):
            continue
        wall, seqs, steps = measure(engine, work, args.repeats)
        made = sum(len(s.sampled) for s in seqs)
        row: dict[str, Any] = {
            "shape": name,
            "work": title,
            "adapters": adapters,
            "weights": weights,
            "driver": type(engine.runner.driver).__name__,
            "weights_changed_s": refresh,
            "tokens": made,
            "seconds": wall,
            "tokens_per_s": made / wall,
            "steps": steps,
        }
        row["logprob_max"], row["logprob_mean"] = logprob_gaps(
            model, seqs[: args.check or None], 16 if device.type == "cpu" else 64
        )
        row["generate_per_s"] = peer(title, model, args, collab, device)
        row["first_token_s"] = first
        table.append(row)
        print(json.dumps(row), flush=True)
    if device.type == "cuda":
        rate, tflops = prefill_rate(engine, 131072, 256)
        way = {"shape": name, "work": "prefill", "adapters": adapters, "weights": weights}
        table.append({**way, "tokens_per_s": rate, "TFLOPs": tflops})
        print(json.dumps(table[-1]), flush=True)
    return table


def peer(
    title: str, model: Any, args: argparse.Namespace, collab: dict[str, int], device: torch.device
) -> float | None:
    """transformers' `generate` on the same work (on a GPU: fewer new ids, which flatters it)."""
    if args.no_peer:
        return None
    rng = random.Random(7)
    if title == "CollabLLM" and device.type == "cpu":
        began = time.perf_counter()
        return collab_generate(model, rng, **collab) / (time.perf_counter() - began)
    if title == "256 prompts":
        prompt, new = 256, 48 if device.type == "cuda" else 256
        ids = torch.tensor([ids_of(rng, model.config.vocab_size, prompt) for _ in range(256 // args.scale)])
        began = time.perf_counter()
        hf_generate(model, ids, new)
        return len(ids) * new / (time.perf_counter() - began)
    return None


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", default=[], choices=list(SHAPES))
    parser.add_argument("--rows", nargs="*", default=[], help="titles to run (their beginnings); default all")
    parser.add_argument("--scale", type=int, default=1, help="divide the number of prompts by this")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--check", type=int, default=0, help="sequences whose log-probabilities are checked; 0 is all")
    parser.add_argument("--kv-bytes", type=int, default=0)
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="with and without adapters of this rank")
    parser.add_argument("--targets", nargs="*", default=SEVEN, help="modules that have adapters")
    parser.add_argument("--weights", choices=["model", "fp8"], default="model", help="fp8: also sample in 8 bits")
    parser.add_argument("--kv", choices=["model", "fp8"], default="model", help="fp8: keys and values in 8 bits, then")
    parser.add_argument("--plain", action="store_true", help="drive the model's own forward, as for unknown families")
    parser.add_argument("--no-peer", action="store_true", help="do not run transformers' generate")
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    gc.freeze()  # what the imports created is not searched again, as in the commands (models/local.py)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shapes = args.shapes or (["135m", "1.1b"] if device.type == "cuda" else ["quickstart"])
    tops = ceilings(device) if device.type == "cuda" else {}
    if tops:
        print(json.dumps(tops), flush=True)
    table = [row for name in shapes for row in run_shape(name, args, device)]
    print(
        f"\n{'shape':11} {'work':14} {'adapters':8} {'weights':7} {'tokens/s':>10} {'generate':>9} {'ratio':>6} "
        f"{'share':>6}  logprob max / mean off"
    )
    plain: dict[tuple[str, str], float] = {}
    for row in table:  # the first of each is without adapters, in the model's own dtype
        plain.setdefault((row["shape"], row["work"]), row["tokens_per_s"])
    for row in table:
        share = row["tokens_per_s"] / plain[row["shape"], row["work"]]
        theirs = row.get("generate_per_s")
        ratio = f"{row['tokens_per_s'] / theirs:6.1f}" if theirs else "     -"
        gaps = (
            f"{row['logprob_max']:.2g} / {row['logprob_mean']:.2g}"
            if "logprob_max" in row
            else f"{row.get('TFLOPs', 0):.0f} TFLOP/s"
        )
        print(
            f"{row['shape']:11} {row['work']:14} {row['adapters']:8} {row['weights']:7} {row['tokens_per_s']:10.0f} "
            f"{theirs or 0:9.0f} {ratio} {share:6.0%}  {gaps}"
        )
    if args.out:
        Path(args.out).write_text(json.dumps({"ceilings": tops, "rows": table}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
