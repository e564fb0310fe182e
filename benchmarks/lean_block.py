"""The learner's lean forward compared with transformers' own: time and memory of forward and backward, random weights.

    python benchmarks/lean_block.py                                  # GPU: 135M, 1.1B, 8B with LoRA
    python benchmarks/lean_block.py --shapes 8b --tokens 8192 --no-peer --profile
    python benchmarks/lean_block.py --shapes tiny --tokens 512       # CPU

Measures from the ids to the head's input and back, without head and optimizer, on sequences of 512 ids. `kept` is the
memory that the forward leaves for the backward, `peak` the highest in addition to the weights, `host` the time until
everything is launched.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from upshot.engine.kernels.plain import AttentionOptions
from upshot.engine.llama.shape import causal_lm
from upshot.training.learner.forward.lean import LeanForward

LENGTH = 512
SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"layers": 4, "hidden": 128, "heads": 4, "kv": 2, "mlp": 352, "lora": 0},
    "135m": {"layers": 30, "hidden": 576, "heads": 9, "kv": 3, "mlp": 1536, "lora": 0},
    "1.1b": {"layers": 22, "hidden": 2048, "heads": 32, "kv": 4, "mlp": 5632, "lora": 0},
    "8b": {"layers": 32, "hidden": 4096, "heads": 32, "kv": 8, "mlp": 14336, "lora": 32},
}
Forward = Callable[[Tensor], Tensor]


def build(name: str, device: torch.device) -> Any:
    """A Llama of the shape with random weights, with LoRA on seven projections where the shape says so."""
    shape = SHAPES[name]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32000, hidden_size=shape["hidden"], intermediate_size=shape["mlp"],
        num_hidden_layers=shape["layers"], num_attention_heads=shape["heads"], num_key_value_heads=shape["kv"],
        max_position_embeddings=2048, tie_word_embeddings=True, initializer_range=0.02,
    )  # fmt: skip
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with device:
        torch.set_default_dtype(dtype)
        model = LlamaForCausalLM(config).eval()
        torch.set_default_dtype(torch.float32)
    if not shape["lora"]:
        return model
    import peft

    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    lora = peft.LoraConfig(r=shape["lora"], lora_alpha=16, target_modules=targets, task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, lora).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "lora_B" in parameter_name:
                parameter.normal_(0, 0.01)
    return model


class Flash(torch.autograd.Function):
    """PyTorch's flash attention over sequences of equal length that lie one after the other."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ends: Tensor, scale: float) -> Tensor:
        """[tokens, heads, dim]"""
        sizes = (ends, ends, LENGTH, LENGTH, 0.0, True)
        out, lse, seed, unused, _ = torch.ops.aten._flash_attention_forward(q, k, v, *sizes, False, scale=scale)
        ctx.save_for_backward(q, k, v, out, lse, seed, unused)
        ctx.sizes, ctx.scale = sizes, scale
        return out

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> Any:
        """Of q, k and v."""
        q, k, v, out, lse, seed, unused = ctx.saved_tensors
        found = torch.ops.aten._flash_attention_backward(
            d, q, k, v, out, lse, *ctx.sizes, seed, unused, scale=ctx.scale
        )
        return *found, None, None


def attend_over(ids: Tensor) -> Any:
    """Causal attention within the sequences."""
    ends = torch.arange(0, len(ids) + 1, LENGTH, dtype=torch.int32, device=ids.device)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        scale = options.scale
        if q.is_cuda:
            return Flash.apply(q, k, v, ends, scale)
        rows = [x.view(-1, LENGTH, *x.shape[1:]).transpose(1, 2) for x in (q, k, v)]
        out = F.scaled_dot_product_attention(*rows, is_causal=True, scale=scale, enable_gqa=True)
        return out.transpose(1, 2).reshape(q.shape)

    return attend


def forwards(model: Any, peer: bool) -> dict[str, Forward]:
    """Ids of all sequences to hidden states, by name."""

    def lean(checkpoint: Any) -> Forward:
        made = LeanForward(model, checkpoint)

        def forward(ids: Tensor) -> Tensor:
            positions = torch.arange(LENGTH, device=ids.device).repeat(len(ids) // LENGTH)
            return made.hidden(ids, positions, attend_over(ids))

        return forward

    def own(ids: Tensor) -> Tensor:
        core = causal_lm(model).model
        return core(input_ids=ids.view(-1, LENGTH), use_cache=False)[0].flatten(0, 1)

    found: dict[str, Forward] = {"transformers": own} if peer else {}
    return found | {"lean": lean("none"), "lean, every 2nd again": lean(2), "lean, all again": lean("block")}


@dataclass
class Measured:
    """One way at one number of tokens."""

    forward: float = 0.0
    whole: float = 0.0
    host: float = 0.0
    kept: float = 0.0
    peak: float = 0.0

    def line(self, tokens: int, work: float) -> str:
        """The figures, and what they mean for this many tokens and FLOPs."""
        return (
            f"forward {self.forward * 1e3:7.1f} ms, whole {self.whole * 1e3:7.1f} ms (host {self.host * 1e3:6.1f}), "
            f"{tokens / self.whole:9,.0f} tokens/s, {work / self.whole / 1e12:5.0f} TFLOP/s, "
            f"kept {self.kept:6.2f} GiB, peak {self.peak:6.2f} GiB"
        )


def measure(model: Any, forward: Forward, ids: Tensor, gradient: Tensor, repeats: int) -> Measured:
    """Best of the repeats, after one to warm up."""
    cuda = ids.is_cuda
    wait = torch.cuda.synchronize if cuda else lambda: None
    best = Measured(1e9, 1e9, 1e9)
    for _ in range(repeats + 1):
        model.zero_grad(set_to_none=True)
        gc.collect()
        wait()
        base = 0
        if cuda:
            torch.cuda.empty_cache()
            base = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        hidden = forward(ids)
        launched = time.perf_counter()
        wait()
        between = time.perf_counter()
        kept = torch.cuda.memory_allocated() - base if cuda else 0
        again = time.perf_counter()
        hidden.backward(gradient)
        launched_too = time.perf_counter()
        wait()
        ended = time.perf_counter()
        best.forward = min(best.forward, between - began)
        best.whole = min(best.whole, between - began + ended - again)
        best.host = min(best.host, launched - began + launched_too - again)
        best.kept, best.peak = kept / 2**30, (torch.cuda.max_memory_allocated() - base) / 2**30 if cuda else 0.0
    return best


def flops(model: Any, tokens: int) -> float:
    """Of the products of forward and backward, none computed again, attention left out."""
    layers = causal_lm(model).model.layers
    weights = sum(p.numel() for name, p in layers.named_parameters() if p.ndim == 2)
    trained = sum(p.numel() for name, p in layers.named_parameters() if p.ndim == 2 and p.requires_grad)
    return tokens * (4.0 * weights + 2.0 * trained)


def agreement(model: Any, ways: dict[str, Forward], ids: Tensor, gradient: Tensor) -> str:
    """How far lean's hidden states and gradients are from transformers', relative to their size (norms)."""
    found = []
    for name in ("transformers", "lean"):
        model.zero_grad(set_to_none=True)
        hidden = ways[name](ids)
        hidden.backward(gradient)
        found.append((hidden.detach().float(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}))
    (own, own_grads), (lean, lean_grads) = found
    worst = max(
        (float((lean_grads[n].float() - g.float()).norm() / g.float().norm().clamp_min(1e-12)), n)
        for n, g in own_grads.items()
    )
    assert own_grads.keys() == lean_grads.keys()
    hidden_off = float((lean - own).norm() / own.norm())
    return f"hidden states off by {hidden_off:.1e}, gradients by up to {worst[0]:.1e} ({worst[1]})"


def profile(model: Any, forward: Forward, ids: Tensor, gradient: Tensor, top: int = 16) -> None:
    """Where the time of one forward and backward goes, by kernel."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiling

    model.zero_grad(set_to_none=True)
    with profiling(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        forward(ids).backward(gradient)
        torch.cuda.synchronize()
    kernels = [e for e in found.key_averages() if e.self_device_time_total > 0 and e.self_cpu_time_total == 0]
    kernels.sort(key=lambda e: -e.self_device_time_total)
    total = sum(e.self_device_time_total for e in kernels)
    print(f"    kernels, {total / 1e3:.1f} ms in all:")
    for event in kernels[:top]:
        each = event.self_device_time_total / event.count
        print(
            f"    {event.self_device_time_total / 1e3:8.2f} ms {event.self_device_time_total / total:5.1%} "
            f"{event.count:5d} × {each:7.1f} µs  {event.key[:110]}"
        )


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["135m", "1.1b", "8b"], choices=SHAPES)
    parser.add_argument("--tokens", nargs="+", type=int, default=[4096, 8192, 16384])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--profile", action="store_true", help="the kernels of the second number of tokens")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for shape in args.shapes:
        model = build(shape, device)
        ways = forwards(model, not args.no_peer)
        for place, tokens in enumerate(args.tokens):
            ids = torch.randint(3, 32000, (tokens,), device=device)
            gradient = torch.randn(tokens, SHAPES[shape]["hidden"], device=device, dtype=causal_lm(model).dtype)
            if place == 0 and not args.no_peer:
                print(f"{shape}: {agreement(model, ways, ids, gradient)}", flush=True)
            work = flops(model, tokens)
            for name, forward in ways.items():
                try:
                    m = measure(model, forward, ids, gradient, args.repeats)
                except torch.OutOfMemoryError:
                    print(f"{shape:5} {tokens:6d} tokens  {name:22} out of memory", flush=True)
                    continue
                print(f"{shape:5} {tokens:6d} tokens  {name:22} {m.line(tokens, work)}", flush=True)
            if args.profile and device.type == "cuda" and place == min(1, len(args.tokens) - 1):
                profile(model, ways["lean"], ids, gradient)
        del model, ways
        gc.collect()


if __name__ == "__main__":
    main()
