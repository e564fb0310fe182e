"""Predicted and measured peak memory of sampling and learning, random weights: how far the memory plan is off.

    python benchmarks/memory_plan.py                        # GPU: 135M, 1.1B, 8B with LoRA r = 32, on the whole card
    python benchmarks/memory_plan.py --shapes 8b --total 40 # as if the card had 40 GiB: parked, merged in place …
    python benchmarks/memory_plan.py --shapes tiny          # CPU: prediction only

Measured is torch.cuda.max_memory_allocated of each phase. Beside it: how much each created object added.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from upshot.config.recipe import Recipe
from upshot.engine.engine import Engine
from upshot.engine.sequence import Rules
from upshot.run.forecast import memory_table
from upshot.training.adapters import add_lora
from upshot.training.bundle import configure_learner, engine_settings
from upshot.training.learner.batch import Datum
from upshot.training.learner.learner import Learner
from upshot.training.learner.memory.fit import plan_loaded
from upshot.training.learner.memory.plan import MemoryPlan
from upshot.training.objectives.objectives import PolicyGradient

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"layers": 2, "hidden": 64, "heads": 4, "kv": 2, "mlp": 128, "vocab": 300, "tied": 1, "lora": 0},
    "135m": {"layers": 30, "hidden": 576, "heads": 9, "kv": 3, "mlp": 1536, "vocab": 49152, "tied": 1, "lora": 0},
    "1.1b": {"layers": 22, "hidden": 2048, "heads": 32, "kv": 4, "mlp": 5632, "vocab": 32000, "tied": 0, "lora": 0},
    "8b": {"layers": 32, "hidden": 4096, "heads": 32, "kv": 8, "mlp": 14336, "vocab": 128256, "tied": 0, "lora": 32},
}
GIB = 2**30


def build(name: str, device: torch.device) -> Any:
    """A Llama of the shape with random weights, made in its dtype."""
    shape = SHAPES[name]
    config = LlamaConfig(
        vocab_size=shape["vocab"], hidden_size=shape["hidden"], intermediate_size=shape["mlp"],
        num_hidden_layers=shape["layers"], num_attention_heads=shape["heads"], num_key_value_heads=shape["kv"],
        max_position_embeddings=4096, tie_word_embeddings=bool(shape["tied"]),
    )  # fmt: skip
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16 if device.type == "cuda" else torch.float32)
    try:
        with device:
            return LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(torch.float32)


def recipe_of(name: str, args: argparse.Namespace) -> Recipe:
    """The setting that is planned: 128 replies of up to 256 ids to prompts of 256."""
    rank = SHAPES[name]["lora"] if args.lora is None else args.lora
    model: dict[str, Any] = {"gradient_checkpointing": args.checkpointing, "memory_gb": args.total, "max_context": 1280}
    if rank:
        model["lora"] = {"r": rank, "dropout": 0.0, "kind": args.kind}
    train = {"token_budget": args.tokens, "optimizer": {"name": args.optimizer, "offload": args.offload}}
    return Recipe.model_validate({
        "task": "slots", "model": model, "episode": {"max_tokens": 256},
        "train": {**train, "lr": 1e-6, "kl": 0.0},
    })  # fmt: skip


class Meter:
    """Bytes of tensors on the device, now and at their highest since the last look."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.before = 0
        self.added: dict[str, float] = {}

    def now(self) -> int:
        if not self.on_gpu:
            return 0
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    def note(self, what: str) -> None:
        """What was made since the last note."""
        now = self.now()
        self.added[what] = (now - self.before) / GIB
        self.before = now

    def reset(self) -> None:
        gc.collect()
        if self.on_gpu:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated() if self.on_gpu else 0


def sequences(vocab: int, count: int) -> list[Datum]:
    """Replies of 64 to 256 ids to prompts of 256."""
    rng = random.Random(0)
    out = []
    for _ in range(count):
        new = rng.randint(64, 256)
        ids = [rng.randrange(3, vocab) for _ in range(256 + new)]
        mask = [0] * 256 + [1] * new
        out.append(Datum(ids, mask, [-8.0 * bit for bit in mask], [0.5 * bit for bit in mask]))
    return out


def sample(engine: Engine, prompts: int, new: int) -> None:
    """Prompts of 256 ids at once."""
    rng = random.Random(1)
    for i in range(prompts):
        ids = [rng.randrange(3, engine.shape.vocab) for _ in range(256)]
        engine.submit(ids, Rules(max_tokens=new, seed=i))
    engine.run_until_done()


def run(name: str, args: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """Both phases of one shape."""
    recipe = recipe_of(name, args)
    meter = Meter(device)
    meter.note("before")
    module = add_lora(build(name, device), recipe.model)
    meter.note("weights and adapters")
    plan: MemoryPlan = plan_loaded(recipe, module, recipe.train)
    if not plan.kv_bytes:
        plan = replace(plan, kv_bytes=1 << 22)
    print(f"\n{name}, {plan.limit / GIB:.1f} GiB to plan with\n{memory_table(plan)}", flush=True)
    learner = Learner(
        module, SimpleNamespace(pad_token_id=0, eos_token_id=0), configure_learner(recipe.train, plan, module)
    )
    meter.note("learner")
    engine = Engine(module, eos_ids=set(), settings=engine_settings(recipe, plan))
    learner.changed = engine.weights_changed
    meter.note("engine")
    data = sequences(SHAPES[name]["vocab"], args.sequences)
    found: dict[str, int] = {"sampling": 0, "learning": 0}
    for turn in range(2):  # the optimizer's state is there after the first
        meter.reset()
        sample(engine, args.prompts, args.new)
        found["sampling"] = max(found["sampling"], meter.peak())
        meter.note(f"sampled {turn}")
        if plan.setting.park:
            engine.park()
        meter.note(f"parked {turn}")
        meter.reset()
        learner.forward_backward([[datum] for datum in data], PolicyGradient(learner.config))
        learner.step()
        found["learning"] = max(found["learning"], meter.peak())
        meter.note(f"learned {turn}")
    print("  added, GiB: " + ", ".join(f"{what} {size:.2f}" for what, size in meter.added.items()), flush=True)
    rows = []
    for phase, measured in found.items():
        predicted = sum(getattr(part, phase) for part in plan.parts)
        rows.append({
            "shape": name, "phase": phase, "predicted_gib": predicted / GIB, "measured_gib": measured / GIB,
            "off": predicted / measured - 1 if measured else None, "tokens": plan.setting.tokens,
            "checkpointing": plan.setting.checkpointing, "merge": plan.setting.merge, "park": plan.setting.park,
            "parts": {part.name: getattr(part, phase) / GIB for part in plan.parts},
        })  # fmt: skip
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", default=[], choices=list(SHAPES))
    parser.add_argument("--total", type=float, default=0, help="GiB to plan for; 0: what the card has")
    parser.add_argument("--tokens", type=int, default=0, help="of a micro-batch; 0: as planned")
    parser.add_argument("--checkpointing", default="auto", choices=["auto", "none", "mlp", "block"])
    parser.add_argument("--lora", type=int, default=None, metavar="RANK", help="0: all weights are trained")
    parser.add_argument("--kind", default="lora", choices=["lora", "rslora", "dora"])
    parser.add_argument("--optimizer", default="adamw", choices=["adamw", "adamw-8bit"])
    parser.add_argument("--offload", action="store_true")
    parser.add_argument("--sequences", type=int, default=128)
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--new", type=int, default=64)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = []
    for name in args.shapes or (["135m", "1.1b", "8b"] if device.type == "cuda" else ["tiny"]):
        rows += run(name, args, device)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    print(f"\n{'shape':6} {'phase':9} {'tokens':>7} {'predicted':>10} {'measured':>9}  off   settings")
    for row in rows:
        off = "    -" if row["off"] is None else f"{row['off']:+5.0%}"
        settings = f"{row['checkpointing']}, {row['merge']}{', parked' if row['park'] else ''}"
        print(
            f"{row['shape']:6} {row['phase']:9} {row['tokens']:7} {row['predicted_gib']:10.2f} "
            f"{row['measured_gib']:9.2f} {off}  {settings}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
