"""Exact mode: is it exact, and what does it cost?

    python benchmarks/exact.py                       # GPU: 135M and 1.1B shapes in bf16, 135M in fp32; CPU: quickstart
    python benchmarks/exact.py --shapes 135m --table # only the table of operations

Prints (1) a table of operations: how many rows change when they are computed in a different batch, with PyTorch's own
operations and with the exact ones; (2) how many of the engine's log-probabilities differ from the learner's; (3) tokens
generated per second and the learner's time, with and without exact mode.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.generate import SHAPES, batch_work, build, collab_work, measure
from upshot.config.recipe import TrainConfig
from upshot.engine.engine import Engine, EngineSettings
from upshot.engine.exact.forward import ExactForward, attend_batch, pick_logprobs
from upshot.engine.exact.mode import ExactMode
from upshot.engine.kernels import plain
from upshot.engine.sequence import Sequence
from upshot.training.learner.batch import Datum, ForwardOutput, TrainBatch
from upshot.training.learner.learner import Learner
from upshot.training.objectives.objectives import PolicyGradient

PARTS = [(0, 1), (1, 3), (3, 10), (10, 43), (43, 107), (107, 300)]
ROWS = 300
_failed: list[str] = []


def changed_rows(function: Callable[[Tensor, int], Tensor], x: Tensor) -> tuple[int, float]:
    """The number of rows of function(x) that change if x is cut into parts, and the largest difference."""
    whole = function(x, 0)
    parts = torch.cat([function(x[start:stop], start) for start, stop in PARTS])
    wrong = (whole != parts).flatten(1).any(1) if whole.dim() > 1 else whole != parts
    return int(wrong.sum()), float((whole.float() - parts.float()).abs().max())


def operations(model: Any, kernels: bool) -> dict[str, tuple[Callable[[Tensor, int], Tensor], Tensor]]:
    """The operations of a block, each as a function of rows (and of the first row's position)."""
    core, layer = model.model, model.model.layers[0]
    config, weight = model.config, model.lm_head.weight
    torch.manual_seed(1)

    def rows(n: int) -> Tensor:
        return torch.randn(ROWS, n, device=weight.device).to(weight.dtype)

    hidden, mlp, heads = config.hidden_size, config.intermediate_size, config.num_attention_heads
    every = torch.arange(ROWS, device=weight.device)

    def rope(x: Tensor, start: int) -> Tensor:
        cos, sin = core.rotary_emb(x, every[None, start : start + len(x)])
        return torch.cat([cos[0], sin[0]], -1)

    return {
        f"q {hidden}x{heads * layer.self_attn.head_dim}": (lambda x, _: layer.self_attn.q_proj(x), rows(hidden)),
        f"k {hidden}x{layer.self_attn.k_proj.out_features}": (lambda x, _: layer.self_attn.k_proj(x), rows(hidden)),
        f"gate {hidden}x{mlp}": (lambda x, _: layer.mlp.gate_proj(x), rows(hidden)),
        f"down {mlp}x{hidden}": (lambda x, _: layer.mlp.down_proj(x), rows(mlp)),
        f"head {hidden}x{len(weight)}": (lambda x, _: model.lm_head(x), rows(hidden)),
        "norm": (lambda x, _: layer.input_layernorm(x), rows(hidden)),
        "rope": (rope, rows(hidden)),
        "silu": (lambda x, _: F.silu(x), rows(mlp)),
    }


def attention_rows(model: Any, kernels: bool, exact: bool) -> tuple[int, float]:
    """Queries whose attention changes if the sequence ends after them, or if other sequences are in the batch."""
    config, weight = model.config, model.lm_head.weight
    torch.manual_seed(2)
    dim, kv = model.model.layers[0].self_attn.head_dim, config.num_key_value_heads
    sizes = (config.num_attention_heads, kv, kv)
    q, k, v = (torch.randn(4, n, ROWS, dim, device=weight.device).to(weight.dtype) for n in sizes)

    def attend(*parts: Tensor) -> Tensor:
        if exact:
            return attend_batch(*parts, plain.AttentionOptions(0.125), kernels)
        return plain.attention(*parts, None, plain.AttentionOptions(0.125)).transpose(1, 2)

    whole = attend(q, k, v)[1]
    wrong, most = 0, 0.0
    for stop in (1, 2, 17, 63, 64, 65, 200, ROWS):
        alone = attend(*(x[1:2, :, :stop].contiguous() for x in (q, k, v)))[0]
        wrong += int((alone != whole[:stop]).flatten(1).any(1).sum())
        most = max(most, float((alone.float() - whole[:stop].float()).abs().max()))
    return wrong, most


def table(model: Any, kernels: bool) -> None:
    """Which operations depend on the batch."""
    print(f"  {'operation':18} {'rows':>5}  changed by the batch: plain (largest)   exact (largest)")
    mode = ExactMode(kernels)
    lines = []
    for name, (function, x) in operations(model, kernels).items():
        with torch.inference_mode():
            loose = changed_rows(function, x)
            with mode:
                tight = changed_rows(function, x)
        lines.append((name, ROWS, loose, tight))
    logits = torch.randn(ROWS, len(model.lm_head.weight), device=model.device).to(model.dtype) * 3
    ids = torch.arange(ROWS, device=model.device) % len(model.lm_head.weight)
    warm = torch.full((ROWS,), 0.7, device=model.device)

    def loose_pick(x: Tensor, start: int) -> Tensor:
        every = (x.float() / 0.7).log_softmax(-1)
        return every.gather(-1, ids[start : start + len(x), None])[:, 0]

    def tight_pick(x: Tensor, start: int) -> Tensor:
        return pick_logprobs(x, ids[start : start + len(x)], warm[: len(x)], kernels)

    with torch.inference_mode():
        lines.append(("logsoftmax", ROWS, changed_rows(loose_pick, logits), changed_rows(tight_pick, logits)))
        found = [attention_rows(model, kernels, exact) for exact in (False, True)]
        lines.append(("attention", 712, found[0], found[1]))
    for name, rows, loose, tight in lines:
        print(f"  {name:18} {rows:5}  {loose[0]:21} ({loose[1]:.1e}) {tight[0]:14} ({tight[1]:.1e})")
        if tight[0]:
            _failed.append(f"{name}: {tight[0]} rows of the exact operation depend on the batch")


class Compare(PolicyGradient):
    """Counts the log-probabilities of a training forward that differ bitwise from the sampler's."""

    wrong = count = 0

    def loss(self, batch: TrainBatch, found: ForwardOutput) -> tuple[Tensor, dict[str, Tensor]]:
        """The policy loss, after a look."""
        self.wrong += int((found.logprobs != batch.columns["old"]).sum())
        self.count += len(found.logprobs)
        return super().loss(batch, found)


def learner_of(model: Any, budget: int, exact: bool) -> Learner:
    """A learner on the model."""
    tokenizer = SimpleNamespace(pad_token_id=0, eos_token_id=0)
    return Learner(model, tokenizer, TrainConfig(token_budget=budget), exact=exact)


def datum(seq: Sequence) -> Datum:
    """A played sequence as training data."""
    prompt = [0.0] * seq.prompt_len
    mask = [0] * seq.prompt_len + [1] * len(seq.sampled)
    return Datum(list(seq.ids), mask, [*prompt, *seq.logprobs], [1.0] * len(seq.ids))


def check(title: str, model: Any, seqs: list[Sequence], budget: int, exact: bool) -> None:
    """One line: how many of the engine's log-probabilities differ from the learner's."""
    data = [datum(seq) for seq in seqs]
    found = learner_of(model, budget, exact).logprobs(data)
    wrong = count = 0
    most, first = 0.0, ""
    for index, (one, row) in enumerate(zip(data, found, strict=True)):
        for at in range(sum(1 for bit in one.mask if not bit), len(one.ids)):
            count += 1
            if row[at] != one.old[at]:
                wrong += 1
                most = max(most, abs(row[at] - one.old[at]))
                first = first or f"; first: sequence {index}, id {at} of {len(one.ids)}, prompt {one.mask.index(1)}"
    print(f"  {title}, micro-batches of {budget}: {count} log-probabilities, {wrong} differ, largest {most:.2e}{first}")
    if exact and wrong:
        _failed.append(f"{title}: {wrong} of {count} log-probabilities differ{first}")


def check_training(title: str, model: Any, seqs: list[Sequence], budget: int) -> None:
    """The same in a forward for training, with its backward pass."""
    learner = learner_of(model, budget, exact=True)
    objective = Compare(learner.config)
    logs = learner.forward_backward([[datum(seq)] for seq in seqs], objective)
    grads = [p.grad for p in learner.parameters if p.grad is not None]
    finite = all(bool(grad.isfinite().all()) for grad in grads)
    learner.optimizer.zero_grad()
    print(
        f"  {title}, training: {objective.count} log-probabilities, {objective.wrong} differ, "
        f"kl_to_sampler {logs['policy/kl_to_sampler']}, gradients {'finite' if finite else 'NOT FINITE'}"
    )
    if objective.wrong or not finite:
        _failed.append(f"{title}: training forward differs in {objective.wrong} places, finite gradients: {finite}")


def seconds(model: Any, rows: int, length: int, exact: bool, backward: bool) -> float:
    """Best of three forward (and backward) passes of a learner."""
    ids = torch.randint(3, model.config.vocab_size, (rows, length), device=model.device)
    forward = ExactForward(kernels=model.device.type == "cuda")
    best = float("inf")
    for _ in range(4):
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        with torch.set_grad_enabled(backward), forward.attention(model) if exact else nullcontext():
            with forward.operations() if exact else nullcontext():
                logits = model(input_ids=ids, use_cache=False).logits
            if exact:
                found = forward.token_logprobs(logits, ids, 1.0)
            else:
                found = -F.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
            if backward:
                found.sum().backward()
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    model.zero_grad()
    return best


def cost(model: Any, engines: dict[bool, Engine], small: bool) -> None:
    """Tokens per second and the learner's seconds, without and with exact mode."""
    work = batch_work(32, 64, 32) if small else batch_work(256, 256, 128)
    rates = {}
    for exact, engine in engines.items():
        wall, seqs, _ = measure(engine, work, 1)
        rates[exact] = sum(len(s.sampled) for s in seqs) / wall
    ratio = rates[True] / rates[False]
    print(f"  generation: {rates[False]:.0f} tokens/s, exact {rates[True]:.0f} ({ratio:.2f} x)")
    rows, length = (16, 96) if small else (16, 512)
    for backward in (False, True):
        plainly, exactly = (seconds(model, rows, length, exact, backward) for exact in (False, True))
        name = "forward and backward" if backward else "forward"
        print(
            f"  learner's {name} of {rows} x {length}: {plainly * 1e3:.1f} ms, exact {exactly * 1e3:.1f} ms "
            f"({exactly / plainly:.2f} x)"
        )


def run(name: str, dtype: torch.dtype, device: torch.device, args: argparse.Namespace) -> None:
    """Everything for one shape and dtype."""
    small = device.type == "cpu"
    began = time.perf_counter()
    model = build(name, device).to(dtype)
    print(f"\n{name}, {str(dtype).removeprefix('torch.')}, {device.type}", flush=True)
    table(model, kernels=not small)
    if args.table:
        return
    sizes = {"prompts": 2 if small else 8, "prompt": 40 if small else 300, "replies": 4 if small else 8}
    sizes |= {"reply": 24 if small else 128, "futures": 2, "rounds": 1, "given": 8 if small else 32}
    work = collab_work(**sizes, new=16 if small else 64)
    kv_bytes = 1 << 28 if small else 8 << 30
    engines = {}
    for exact in (False, True) if dtype != torch.float32 or small else (True,):
        engine = engines[exact] = Engine(model, eos_ids=set(), settings=EngineSettings(exact=exact, kv_bytes=kv_bytes))
        seqs = work(engine, random.Random(3))
        title = "exact" if exact else "default"
        for budget in (2048, 16384) if exact else (16384,):
            check(title, model, seqs, budget, exact)
        if exact:
            check_training(title, model, seqs[:: max(1, len(seqs) // 16)], 4096)
    if len(engines) == 2:
        cost(model, engines, small)
    print(f"  {time.perf_counter() - began:.1f} s", flush=True)


def main() -> int:
    """Run and print; 1 if anything that must be exact is not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", default=[], choices=list(SHAPES))
    parser.add_argument("--dtypes", nargs="*", default=[], choices=["bfloat16", "float32"])
    parser.add_argument("--table", action="store_true", help="only the table of operations")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        cases = [(name, torch.float32) for name in args.shapes or ["quickstart"]]
    elif args.shapes or args.dtypes:
        dtypes = [getattr(torch, d) for d in args.dtypes or ["bfloat16"]]
        cases = [(name, dtype) for name in args.shapes or ["135m"] for dtype in dtypes]
    else:
        cases = [("135m", torch.bfloat16), ("1.1b", torch.bfloat16), ("135m", torch.float32)]
    for name, dtype in cases:
        run(name, dtype, device, args)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    print("\n" + ("\n".join(["NOT EXACT", *_failed]) if _failed else "all exact"))
    return 1 if _failed else 0


if __name__ == "__main__":
    sys.exit(main())
