"""Model families in our block: tokens per second, compared with their own forward in our engine and with `generate`.

    python benchmarks/families.py                       # GPU: real small shapes, random weights, bfloat16
    python benchmarks/families.py --only Phi3 Granite
    python benchmarks/families.py --tiny                # CPU, in seconds

A row has the speed of 256 prompts of 128 ids continued by 64, best of the repeats after a warm-up; the same without the
block (our attention inside transformers' forward); and transformers' `generate` (64 prompts, 16 ids, which favours it,
because contexts stay short). Then it shows how far sampled log-probabilities are from a plain forward of the model,
with and without the block; without it, the difference is only rounding.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from upshot.engine.engine import Engine, EngineSettings
from upshot.engine.sequence import Rules, Sequence


def shape(layers: int, hidden: int, heads: int, kv: int, dim: int, mlp: int, vocab: int, **more: Any) -> dict[str, Any]:
    """A configuration's sizes."""
    names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    sizes = dict(zip(names, (layers, hidden, heads, kv, dim), strict=True))
    return {**sizes, "intermediate_size": mlp, "vocab_size": vocab, "max_position_embeddings": 2048, **more}


CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "attn_implementation": "eager"}
FACTORS = {"residual_multiplier": 0.22, "embedding_multiplier": 12.0, "logits_scaling": 8.0}
EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}
SHAPES = {
    "Llama": shape(16, 2048, 32, 8, 64, 8192, 49152),
    "Gemma2": shape(26, 2304, 8, 4, 256, 9216, 256000, sliding_window=512, query_pre_attn_scalar=256, **CAPS),
    "Gemma3": shape(26, 1152, 4, 1, 256, 6912, 262144, sliding_window=512, query_pre_attn_scalar=256),
    "Olmo2": shape(16, 2048, 16, 16, 128, 8192, 100352),
    "Phi3": shape(32, 3072, 32, 32, 96, 8192, 32064, sliding_window=2047),
    "Granite": shape(40, 2048, 32, 8, 64, 8192, 49155, attention_multiplier=0.015625, **FACTORS),
    "Qwen3Moe": shape(4, 2048, 32, 4, 128, 6144, 151936, **EXPERTS),
    "GptOss": shape(6, 2880, 64, 8, 64, 2880, 201088, sliding_window=128, num_local_experts=32, num_experts_per_tok=4),
}
"""1.1B, for comparison; Gemma 2 2B, Gemma 3 1B, OLMo 2 1B, Phi-3 mini, Granite 2B; four layers of Qwen3-30B-A3B,
six of GPT-OSS 20B."""


def build(family: str, device: torch.device, tiny: bool) -> Any:
    """A model of the shape with random weights (bf16 on a GPU, float32 on the CPU)."""
    sizes = dict(SHAPES[family])
    if tiny:
        sizes |= {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 97, "head_dim": 16}
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
        few = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_local_experts": 8}
        sizes |= {name: number for name, number in few.items() if name in sizes}
    config_name = "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config"
    ids = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
    config = getattr(transformers, config_name)(**sizes, **ids, initializer_range=0.04)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16 if device.type == "cuda" else torch.float32)
    try:
        with device:
            model = getattr(transformers, f"{family}ForCausalLM")(config)
    finally:
        torch.set_default_dtype(torch.float32)
    return model.eval()


def seconds(device: torch.device) -> float:
    """Now, when the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def run_engine(model: Any, lean: bool, options: argparse.Namespace) -> tuple[float, str, list[Sequence]]:
    """Tokens a second, the driver, and the last run's sequences."""
    device = next(model.parameters()).device
    settings = EngineSettings(lean=lean, kv_bytes=(12 << 30) if device.type == "cuda" else 1 << 27)
    engine = Engine(model, eos_ids=set(), settings=settings)
    best, vocab = float("inf"), engine.shape.vocab
    for repeat in range(options.repeats + 1):
        rng = random.Random(repeat)
        prompts = [[rng.randrange(3, vocab) for _ in range(options.prompt)] for _ in range(options.rows)]
        began = seconds(device)
        seqs = [engine.submit(p, Rules(max_tokens=options.new, seed=i))[0] for i, p in enumerate(prompts)]
        engine.run_until_done()
        best = min(best, seconds(device) - began) if repeat else best
    name = type(engine.runner.driver).__name__
    engine.park()
    return options.rows * options.new / best, name, seqs


def run_generate(model: Any, options: argparse.Namespace) -> float:
    """transformers' tokens a second."""
    device = next(model.parameters()).device
    rows, new = max(1, options.rows // 4), max(2, options.new // 4)
    ids = torch.randint(3, model.config.vocab_size, (rows, options.prompt), device=device)
    best = float("inf")
    for _ in range(2):
        began = seconds(device)
        model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=True, top_k=0,
            pad_token_id=0,
        )  # fmt: skip
        best = min(best, seconds(device) - began)
    return rows * new / best


def gaps(model: Any, seqs: list[Sequence]) -> tuple[float, float]:
    """The mean and the largest difference of sampled log-probabilities from a plain forward's."""
    device = next(model.parameters()).device
    found = []
    for seq in seqs[:16]:
        ids = torch.tensor([seq.ids], device=device)
        with torch.no_grad():
            rows = model(input_ids=ids, use_cache=False).logits[0, seq.prompt_len - 1 : -1].float().log_softmax(-1)
        own = rows.gather(-1, ids[0, seq.prompt_len :, None])[:, 0].cpu()
        found.append((own - torch.tensor(seq.logprobs)).abs())
    every = torch.cat(found)
    return float(every.mean()), float(every.max())


def measure(family: str, device: torch.device, options: argparse.Namespace) -> dict[str, Any]:
    """One family's row."""
    model = build(family, device, options.tiny)
    row: dict[str, Any] = {"family": family, "weights, B": sum(p.numel() for p in model.parameters()) / 1e9}
    for title, lean in (("block", True), ("own forward", False)):
        began = time.perf_counter()
        rate, driver, seqs = run_engine(model, lean, options)
        mean, most = gaps(model, seqs)
        row[title] = {"tokens/s": round(rate), "driver": driver, "mean gap": mean, "largest": most}
        row[title]["took s"] = round(time.perf_counter() - began, 1)
    row["generate tokens/s"] = round(run_generate(model, options))
    row["block / generate"] = round(row["block"]["tokens/s"] / row["generate tokens/s"], 1)
    row["block / own forward"] = round(row["block"]["tokens/s"] / row["own forward"]["tokens/s"], 2)
    return row


def main() -> int:
    """Run and print, a line of JSON for each family."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=SHAPES, default=[])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--rows", type=int, default=0)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()
    options.rows = options.rows or (8 if options.tiny else 256)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for family in options.only or SHAPES:
        try:
            print(json.dumps(measure(family, device, options)), flush=True)
        except Exception as error:  # one family that fails must not cost the others their turn on a GPU
            print(json.dumps({"family": family, "error": f"{type(error).__name__}: {str(error)[:400]}"}), flush=True)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
