"""Tokens learned per second: the learner's packed and padded forwards and TRL's loss, in one run, random weights.

    python benchmarks/learn.py                               # GPU: 135M, 1.1B, and 8B with LoRA
    python benchmarks/learn.py --shapes 8b --budgets 4096 8192 --ways lean
    python benchmarks/learn.py --shapes tiny                 # CPU, in seconds

A step is the policy gradient of 128 sequences (16 prompts of 128 ids, 8 replies of 64 to 256 ids each) and one
optimizer step. All tokens of all sequences count; TFLOP/s are 6 x weights x tokens (4 x for frozen weights), so a
way that skips work (shared prefixes, logits of untrained tokens) shows more. Loss and gradient norm are those of the
first step; in them, the ways must agree up to bfloat16's rounding.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from upshot.config.recipe import LoraConfig, PolicyConfig, TrainConfig
from upshot.models.tiny import tiny_tokenizer
from upshot.training.adapters import PROJECTIONS, add_lora
from upshot.training.learner.batch import Datum
from upshot.training.learner.forward.packed import PackedForward
from upshot.training.learner.forward.padded import PaddedForward
from upshot.training.learner.forward.select import states_of
from upshot.training.learner.learner import Learner
from upshot.training.objectives.objectives import PolicyGradient

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"layers": 2, "hidden": 64, "heads": 4, "kv": 2, "mlp": 128, "vocab": 512, "tied": True},
    "quickstart": {"layers": 5, "hidden": 128, "heads": 4, "kv": 2, "mlp": 352, "vocab": 100, "tied": True},
    "135m": {"layers": 30, "hidden": 576, "heads": 9, "kv": 3, "mlp": 1536, "vocab": 49152, "tied": True},
    "1.1b": {"layers": 22, "hidden": 2048, "heads": 32, "kv": 4, "mlp": 5632, "vocab": 32000, "tied": False},
    "8b": {
        "layers": 32,
        "hidden": 4096,
        "heads": 32,
        "kv": 8,
        "mlp": 14336,
        "vocab": 128256,
        "tied": False,
        "lora": 32,
    },
}
BUDGETS = {"tiny": 2048, "quickstart": 4096, "135m": 12288, "1.1b": 8192, "8b": 8192}
"""Micro-batches that keep each shape under the memory it is to fit in."""


def build(name: str, device: torch.device) -> Any:
    """A Llama of the shape with random weights (bf16 on a GPU, float32 on the CPU), with adapters where it has them."""
    shape = SHAPES[name]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=shape["vocab"],
        hidden_size=shape["hidden"],
        intermediate_size=shape["mlp"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv"],
        max_position_embeddings=8192,
        tie_word_embeddings=shape["tied"],
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if device.type == "cuda" else torch.float32)
    try:
        with device:
            module: Any = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    if "lora" in shape:
        lora = LoraConfig(r=shape["lora"], alpha=16, targets=list(PROJECTIONS))
        module = add_lora(module, PolicyConfig(lora=lora))
    return module


def sequences(vocab: int, prompts: int, replies: int, prompt: int, low: int, high: int) -> list[Datum]:
    """Random prompts with random replies, each with one advantage."""
    rng = random.Random(0)
    data = []
    for _ in range(prompts):
        start = [rng.randrange(7, vocab) for _ in range(prompt)]
        for _ in range(replies):
            reply = [rng.randrange(7, vocab) for _ in range(rng.randint(low, high))]
            size = prompt + len(reply)
            advantage = rng.gauss(0, 1)
            data.append(Datum([*start, *reply], [0] * prompt + [1] * len(reply), [0.0] * size, [advantage] * size))
    return data


def flops(module: Any, tokens: int) -> float:
    """What a step takes: 2 a weight and token on the way there, 2 for the inputs' gradients, 2 for trained weights'."""
    embedding = module.get_input_embeddings().weight
    tied = module.get_output_embeddings().weight is embedding
    weights = [p for p in module.parameters() if p.ndim == 2 and (tied or p is not embedding)]
    return sum((6 if p.requires_grad else 4) * p.numel() for p in weights) * float(tokens)


@contextmanager
def way(learner: Learner, name: str) -> Iterator[None]:
    """Inside this context, the learner reads in this way."""
    before = learner.forward
    kind, _, shared = name.partition(", ")
    if kind == "padded":
        learner.forward = PaddedForward(learner.module)
    else:
        (make,) = [make for make in states_of(learner.module) if make.__name__ == kind]
        learner.forward = PackedForward(learner.module, make())
        learner.forward.shares = bool(shared)
    try:
        yield
    finally:
        learner.forward = before


def ours(learner: Learner, data: list[Datum]) -> Callable[[], dict[str, float]]:
    """One step of our learner."""
    objective = PolicyGradient(learner.config)

    def step() -> dict[str, float]:
        logs = learner.forward_backward([[datum] for datum in data], objective)
        return {"loss": logs["loss/policy"], **learner.step()}

    return step


def trl_step(learner: Learner, data: list[Datum], budget: int, folder: str) -> Callable[[], dict[str, float]]:
    """The same step by TRL's `GRPOTrainer`: its loss over padded micro-batches, our optimizer."""
    import datasets
    import trl

    cuda = learner.module.device.type == "cuda"
    args = trl.GRPOConfig(
        output_dir=folder, use_cpu=not cuda, bf16=cuda, report_to="none", per_device_train_batch_size=8,
        num_generations=8, gradient_checkpointing=False, loss_type="grpo", max_completion_length=256, beta=0.0,
    )  # fmt: skip
    rows = datasets.Dataset.from_list([{"prompt": "w1 w2"}] * 8)
    trainer = trl.GRPOTrainer(
        learner.module, reward_funcs=lambda completions, **_: [0.0] * len(completions), args=args,
        train_dataset=rows, processing_class=learner.tokenizer,
    )  # fmt: skip
    prompt = data[0].mask.index(1)
    widest = max(len(datum.ids) for datum in data)
    count = max(budget // widest, 1)
    parts = [data[i : i + count] for i in range(0, len(data), count)]
    trainer.current_gradient_accumulation_steps = 1

    def inputs(part: list[Datum]) -> dict[str, Any]:
        width = max(len(datum.ids) for datum in part)
        rows = [datum.ids + [0] * (width - len(datum.ids)) for datum in part]
        mask = [[1] * len(datum.ids) + [0] * (width - len(datum.ids)) for datum in part]
        old = [datum.old + [0.0] * (width - len(datum.ids)) for datum in part]
        ids, seen = torch.tensor(rows).to(learner.module.device), torch.tensor(mask).to(learner.module.device)
        return {
            "prompt_ids": ids[:, :prompt],
            "prompt_mask": seen[:, :prompt],
            "completion_ids": ids[:, prompt:],
            "completion_mask": seen[:, prompt:],
            "old_per_token_logps": torch.tensor(old).to(ids.device)[:, prompt:],
            "advantages": torch.tensor([datum.advantages[0] for datum in part]).to(ids.device),
            "num_items_in_batch": seen[:, prompt:].sum(),
        }

    def step() -> dict[str, float]:
        learner.module.train()
        total = 0.0
        for part in parts:
            loss = trainer._compute_loss(trainer.model, inputs(part)) * (len(part) / len(data))
            loss.backward()
            learner.optimizer.gather()
            total += float(loss.detach())
        return {"loss": total, **learner.step()}

    return step


def measure(step: Callable[[], dict[str, float]], repeats: int, device: torch.device) -> dict[str, float]:
    """Seconds of the first and of the best later step, peak memory, loss and gradient norm of the first."""

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    times, first = [], {}
    for _ in range(repeats + 1):
        began = now()
        logs = step()
        first = first or logs
        times.append(now() - began)
    memory = torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else 0.0
    return {
        "first_s": times[0], "best_s": min(times[1:] or times), "peak_gb": memory, "loss": first["loss"],
        "grad_norm": first["train/grad_norm"],
    }  # fmt: skip


def run(name: str, args: argparse.Namespace, device: torch.device) -> None:
    """All ways and budgets of one shape."""
    module = build(name, device)
    small = name in ("tiny", "quickstart")
    sizes = (2, 8, 32, 8, 32) if small else (args.prompts, args.replies, args.prompt, 64, 256)
    data = sequences(SHAPES[name]["vocab"], *sizes)
    tokenizer = tiny_tokenizer([f"w{n}" for n in range(64)])
    # A tiny learning rate: every step is the same, whichever way comes first.
    learner = Learner(module, tokenizer, TrainConfig(lr=1e-30, token_budget=1 << 14, length_norm="sequence"))
    if args.checkpoint:
        module.gradient_checkpointing_enable()
    for datum, old in zip(data, learner.logprobs(data), strict=True):
        datum.old = old
    tokens, work = sum(len(datum.ids) for datum in data), flops(module, sum(len(datum.ids) for datum in data))
    trained = sum(sum(datum.mask) for datum in data)
    print(f"\n{name}: {tokens} tokens, {trained} trained, {len(data)} sequences, {device.type}", flush=True)
    print(
        f"  {'way':22} {'budget':>7} {'tokens/s':>9} {'TFLOP/s':>8} {'peak GB':>8} {'first s':>8}  loss, gradient norm"
    )
    kinds = [make.__name__ for make in states_of(module)]
    every = [*(f"{kind}, shared" for kind in kinds), *kinds, "padded", "trl"]
    rows: dict[str, dict[str, float]] = {}
    for title in [title for title in every if not args.ways or any(wanted in title for wanted in args.ways)]:
        for budget in args.budgets or [BUDGETS[name]]:
            learner.config = learner.config.model_copy(update={"token_budget": budget})
            row: dict[str, float] = {}
            try:
                row = one(learner, data, title, budget, args, device)
            except Exception as error:  # one way that fails must not cost the others their turn on a GPU
                print(f"  {title:22} {budget:7} {type(error).__name__}: {str(error)[:200]}", flush=True)
            if not row:
                learner.optimizer.zero_grad()
                gc.collect()
                continue
            rows[title] = row
            rate = tokens / row["best_s"]
            print(
                f"  {title:22} {budget:7} {rate:9.0f} {work / row['best_s'] / 1e12:8.1f} {row['peak_gb']:8.2f} "
                f"{row['first_s']:8.2f}  {row['loss']:+.6f} {row['grad_norm']:.5f}",
                flush=True,
            )
            if args.json:
                print(json.dumps({"shape": name, "way": title, "budget": budget, "tokens_s": rate, **row}), flush=True)

    for peer in {"padded", "trl"} & rows.keys():
        gaps = [
            max(abs(row[key] - rows[peer][key]) / (abs(rows[peer][key]) + 1e-9) for row in rows.values())
            for key in ("loss", "grad_norm")
        ]
        print(f"  farthest from {peer}: loss {gaps[0]:.1e}, gradient norm {gaps[1]:.1e} (relative)", flush=True)


def one(
    learner: Learner, data: list[Datum], title: str, budget: int, args: argparse.Namespace, device: torch.device
) -> dict[str, float]:
    """One row of the table."""
    if title == "trl":
        with tempfile.TemporaryDirectory() as folder:
            return measure(trl_step(learner, data, budget, folder), args.repeats, device)
    with way(learner, title):
        return measure(ours(learner, data), args.repeats, device)


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", default=[], choices=list(SHAPES))
    parser.add_argument("--ways", nargs="*", default=[], help="only ways whose names hold one of these")
    parser.add_argument("--budgets", nargs="*", type=int, default=[], help="flat tokens of a micro-batch")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--replies", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=128, help="ids of a prompt")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--checkpoint", action="store_true", help="compute layers again in the backward")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for name in args.shapes or (["tiny"] if device.type == "cpu" else ["135m", "1.1b", "8b"]):
        run(name, args, device)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
