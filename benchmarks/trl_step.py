"""A whole GRPO step of Upshot and of TRL's `GRPOTrainer`: the same model, prompts, sizes and card, one after the other.

    python benchmarks/trl_step.py                             # GPU: 1.1B, 16 prompts x 8 replies of 256 ids
    python benchmarks/trl_step.py --shape 8b --peer-batch 8   # GPU: 8B with LoRA
    python benchmarks/trl_step.py --shape tiny                # CPU, in seconds

TRL samples with transformers' `generate` and, if vLLM is installed, with vLLM in its own process ('colocate'). Each
variant runs in a separate process, so that it has the memory to itself, and if one cannot start, the others still give
figures. Random weights and replies of full length. Prints the best step after the first, the part of it that is
sampling (for TRL including sending the weights to vLLM), the peak of torch's allocated memory, the first step, and the
ratio to our time.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.grpo_step import SPECIALS, add_sizes, now, ours, settle, words
from benchmarks.learn import SHAPES, build
from upshot.models.tiny import tiny_tokenizer

WAYS = ("ours", "trl", "trl+vllm")
MARK = "trl_step result: "
VLLM_SHARE = 0.3
"""TRL's own default of the card's memory for a vLLM beside the trainer."""


def trl(options: argparse.Namespace, device: torch.device, vllm: bool) -> dict[str, Any]:
    """Steps of TRL's trainer."""
    import datasets
    from trl import GRPOConfig, GRPOTrainer

    steps: list[dict[str, float]] = []
    sampling: list[float] = []

    class Timed(GRPOTrainer):  # type: ignore[misc]
        """TRL's trainer with a clock around sampling."""

        def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
            began = now(device)
            out = super()._generate_single_turn(*args, **kwargs)
            sampling.append(now(device) - began)
            return out

    with tempfile.TemporaryDirectory(dir="/dev/shm" if vllm and Path("/dev/shm").is_dir() else None) as folder:
        module, tokenizer = _model(options, device, folder if vllm else "")
        more: dict[str, Any] = {"generation_kwargs": {"min_new_tokens": options.new}}
        if vllm:
            longest = 2 * options.prompt + options.new + 64  # a template stands around the prompt's words
            more = {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": VLLM_SHARE}
            more |= {"vllm_max_model_length": longest, "generation_kwargs": {"ignore_eos": True}}
        vocab = SHAPES[options.shape]["vocab"]
        texts = [words(i, options.prompt, vocab) for i in range(options.prompts)]
        args = GRPOConfig(
            output_dir=folder, use_cpu=device.type == "cpu", bf16=device.type == "cuda", report_to="none", beta=0.0,
            per_device_train_batch_size=options.peer_batch, num_generations=options.replies, learning_rate=1e-6,
            gradient_accumulation_steps=options.prompts * options.replies // options.peer_batch, save_strategy="no",
            max_completion_length=options.new, max_steps=options.repeats + 1, gradient_checkpointing=False,
            logging_strategy="no", disable_tqdm=True, temperature=1.0, seed=0, **more,
        )  # fmt: skip
        trainer = Timed(
            module, reward_funcs=lambda completion_ids, **_: [float(sum(ids) % 2) for ids in completion_ids], args=args,
            train_dataset=datasets.Dataset.from_list([{"prompt": [{"role": "user", "content": t}]} for t in texts]),
            processing_class=tokenizer, callbacks=[_clock(steps, sampling, device)],
        )  # fmt: skip
        trainer.train()
    return {"first step": steps[0], "step": min(steps[1:] or steps, key=lambda step: step["step"])}


def _model(options: argparse.Namespace, device: torch.device, folder: str) -> tuple[Any, Any]:
    """The model and its tokenizer; with a folder they lie there, too, where vLLM reads them."""
    tokenizer = tiny_tokenizer([f"w{n}" for n in range(SHAPES[options.shape]["vocab"] - SPECIALS)])
    tokenizer.eos_token = "<|unknown|>"  # next to never sampled: replies have their full length
    module = build(options.shape, device)
    if folder:
        whole = module.get_base_model() if hasattr(module, "peft_config") else module
        if whole is not module:
            raise SystemExit("vLLM beside adapters is not measured here; take a shape without them")
        whole.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        module.config._name_or_path = module.name_or_path = folder
    return module, tokenizer


def _clock(steps: list[dict[str, float]], sampling: list[float], device: torch.device) -> Any:
    """Notes every step: its seconds, those of sampling within it, and the most memory."""
    from transformers import TrainerCallback

    began = 0.0

    class Clock(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            nonlocal began
            sampling.clear()
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            began = now(device)

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            spent, sampled = now(device) - began, sum(sampling)
            memory = torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else 0.0
            steps.append({"sample": sampled, "learn": spent - sampled, "step": spent, "peak_gb": memory})

    return Clock()


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=list(WAYS))
    parser.add_argument("--peer-batch", type=int, default=32, help="TRL's sequences a micro-batch")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds that each may take")
    parser.add_argument("--alone", choices=WAYS, help=argparse.SUPPRESS)
    parser.set_defaults(collabllm=False)
    add_sizes(parser)
    options = parser.parse_args()
    options.shape = options.shape or "1.1b"
    options = settle(options)
    options.peer_batch = min(options.peer_batch, options.prompts * options.replies)
    return options


def why_not(way: str) -> str:
    """What is not installed for a way; empty: nothing."""
    needs = {"ours": (), "trl": ("trl", "datasets"), "trl+vllm": ("trl", "datasets", "vllm")}[way]
    missing = [name for name in needs if importlib.util.find_spec(name) is None]
    return f"not installed: {', '.join(missing)}" if missing else ""


def measure(way: str, limit: float) -> dict[str, Any]:
    """One of them in a process of its own; what it found, or why it did not."""
    if why := why_not(way):
        return {"failed": why}
    words_given = [sys.executable, __file__, *sys.argv[1:], "--alone", way]
    try:
        done = subprocess.run(words_given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=limit)
    except subprocess.TimeoutExpired as error:
        said = (error.stdout or b"").decode(errors="replace") if isinstance(error.stdout, bytes) else error.stdout or ""
        print(said[-3000:], flush=True)
        return {"failed": f"not done within {limit:.0f} s"}
    found = [line.removeprefix(MARK) for line in done.stdout.splitlines() if line.startswith(MARK)]
    if found:
        return dict(json.loads(found[-1]))
    print(done.stdout[-6000:], flush=True)
    last = (done.stdout.strip().splitlines() or ["nothing said"])[-1]
    return {"failed": f"exit code {done.returncode}: {last[:200]}"}


def run_alone(options: argparse.Namespace) -> int:
    """What the process of one of them does."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if options.alone == "ours":
        out = asyncio.run(ours(options, device))
    else:
        out = trl(options, device, options.alone == "trl+vllm")
    print(MARK + json.dumps(out), flush=True)
    return 0


def _versions() -> str:
    names = ("torch", "transformers", "trl", "vllm")
    found = {one.metadata["Name"].lower(): one.version for name in names for one in _distributions(name)}
    return ", ".join(f"{name} {found.get(name, 'not installed')}" for name in names)


def _distributions(name: str) -> list[importlib.metadata.Distribution]:
    return list(importlib.metadata.distributions(name=name))[:1]


def main() -> int:
    """Run all and print the table."""
    options = arguments()
    if options.alone:
        return run_alone(options)
    print(f"{options.shape}, {options.prompts} x {options.replies} replies of {options.new} ids; {_versions()}")
    base = None
    for way in options.ways:
        found = measure(way, options.limit)
        if "failed" in found:
            print(f"{way:9} {found['failed']}", flush=True)
            continue
        step, first = found["step"], found["first step"]["step"]
        base = step["step"] if way == "ours" else base
        ratio = f"{step['step'] / base:.1f} x ours" if base else ""
        parts = f"{step['sample']:.2f} sampling + {step['learn']:.2f} learning, {step['peak_gb']:.1f} GB"
        print(f"{way:9} {step['step']:8.3f} s ({parts}), first {first:.2f} s  {ratio}", flush=True)
        print(json.dumps({way: found}), flush=True)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
