"""How far sampled log-probabilities are from a plain forward if keys have biases, in 16 and in 8 bits. Needs a GPU.

    python benchmarks/key_biases.py

Random weights in the shape of Qwen2.5-1.5B. In the first and the last layer, three numbers of each key head have a
large bias; all other biases are small. Such biases are why `eight_bit.MOST_KEY_BIAS` refuses `kv: fp8`; here the limit
is lifted.
"""

from __future__ import annotations

import gc
import math
import random
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.generate import batch_work, logprob_gaps
from upshot.core.errors import UserError
from upshot.engine.engine import Engine, EngineSettings
from upshot.engine.llama import eight_bit

LAYERS, KV_HEADS, HEAD = 28, 2, 128


def build(largest: float) -> Qwen2ForCausalLM:
    """The model; `largest`: about the largest bias of a key, 0 for none at all."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=151936,
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=LAYERS,
        num_attention_heads=12,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    with torch.device("cuda"):
        model = Qwen2ForCausalLM(config).to(torch.bfloat16).eval()
    if not largest:
        return model
    with torch.no_grad():
        for number, layer in enumerate(model.model.layers):
            attention: Any = layer.self_attn
            attention.q_proj.bias.normal_(std=0.5)
            attention.k_proj.bias.normal_()
            if number in (0, LAYERS - 1):
                few = largest * torch.tensor([1.0, -0.7, 1.3], device="cuda")
                attention.k_proj.bias.view(KV_HEADS, HEAD)[:, [5, 63, 127]] = few.to(torch.bfloat16)
    return model


def main() -> int:
    """Run and print."""
    eight_bit.MOST_KEY_BIAS = math.inf
    print(f"{'bias':>5} {'weights':>8} {'kv':>6} {'mean':>7} {'most':>7}")
    for largest in (0.0, 3.0, 10.0, 60.0, 200.0):
        model = build(largest)
        for weights, kv in (("model", "model"), ("model", "fp8"), ("fp8", "model"), ("fp8", "fp8")):
            settings = EngineSettings(kv_bytes=4 << 30, weights=weights, kv=kv)  # type: ignore[arg-type]
            try:
                engine = Engine(model, eos_ids=set(), settings=settings)
            except UserError as error:
                print(f"{largest:5.0f} {weights:>8} {kv:>6} refused: {error}", flush=True)
                continue
            seqs = batch_work(32, 256, 128)(engine, random.Random(0))
            most, mean = logprob_gaps(model, seqs, 16)
            print(f"{largest:5.0f} {weights:>8} {kv:>6} {mean:7.3f} {most:7.2f}", flush=True)
            del engine
            gc.collect()
            torch.cuda.empty_cache()
        del model
        gc.collect()
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
