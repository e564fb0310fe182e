"""Does Upshot learn as well as TRL? One task, one start, the same estimator, learning rate, batch and steps.

    python benchmarks/trl_learn.py --seeds 1 2 3              # GPU: SmolLM2-135M, 100 steps of 16 prompts x 8 replies
    python benchmarks/trl_learn.py --alone trl --seeds 1 --start FOLDER --out trl-1.jsonl

The task is `withheld` with nothing withheld: a word problem, one reply, 1 for the right number and 0 for any other.
After a few steps of SFT (shared by all runs) both learn by GRPO: rewards centred and divided by the deviation of their
group, one update per step, the clipped loss averaged over all tokens of the step, no KL, AdamW without decay, constant
learning rate, temperature 1. Upshot keeps bfloat16 weights with float32 masters, TRL float32 weights under autocast.
Every problem is used at most once, so the reward of a step is measured on problems that the model has never seen.
Each line of the output is a step: its reward, and the seconds since the first step began.
TRL samples with transformers' `generate`; benchmarks/trl_step.py compares the speed of a step, with vLLM too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from upshot.core.conversation import Conversation, Message, Row
from upshot.tasks.withheld import WithheldTask

BETAS = (0.9, 0.95)


def recipe(options: argparse.Namespace, seed: int, run_dir: str) -> dict[str, Any]:
    """Our side of the comparison; with no steps it is the SFT that both start from."""
    return {
        "name": "trl-learn", "seed": seed, "run_dir": run_dir,
        "model": {"path": options.start or options.model, "max_context": 512, "memory_gb": options.memory_gb},
        "task": {"name": "withheld", "ambiguous": 0.0, "rows_per_split": options.rows},
        "episode": {"max_tokens": options.new},
        "reward": {"metrics": [{"name": "verifier"}]},
        "warm_start": None if options.start else {"steps": options.sft_steps, "batch": 64, "lr": 5e-5},
        "train": {
            "method": "rl", "advantage": "grpo", "steps": options.steps if options.start else 0,
            "prompts_per_step": options.prompts, "group_size": options.replies, "lr": options.lr,
            "optimizer": {"betas": list(BETAS)}, "save": {"every": 0, "keep": 1, "best": None},
        },
    }  # fmt: skip


def train_ours(options: argparse.Namespace, seed: int, folder: str) -> Path:
    """Train our recipe in this process and return the run folder."""
    from upshot.config.load import validate_recipe
    from upshot.run.run import train

    return train(validate_recipe(recipe(options, seed, folder))).path


def ours(options: argparse.Namespace, seed: int, folder: str) -> list[dict[str, float]]:
    """Our reward by step."""
    run = train_ours(options, seed, f"{folder}/run")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps, seconds = [], 0.0
    for row in rows:
        if "reward/mean" in row:
            seconds += row["time/step"]
            steps.append({"step": row["step"], "reward": row["reward/mean"], "seconds": seconds})
    return steps


def verdict(task: WithheldTask, row: Row, text: str) -> float:
    """What our own verifier says to a reply."""
    conversation = Conversation(row)
    conversation.say(Message("assistant", text))
    score = asyncio.run(task.verify(conversation))
    assert score.value is not None
    return score.value


def trl(options: argparse.Namespace, seed: int, folder: str) -> list[dict[str, float]]:
    """TRL's reward by step."""
    import datasets
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    gpu = torch.cuda.is_available()
    task = WithheldTask(rows_per_split=options.rows, ambiguous=0.0)
    rows = {row.id: row for row in task.rows("train")}
    steps: list[dict[str, float]] = []
    rewards: list[float] = []
    began = 0.0

    def right(completions: list[Any], row: list[str], **_: Any) -> list[float]:
        out = [verdict(task, rows[name], said[0]["content"]) for name, said in zip(row, completions, strict=True)]
        rewards.extend(out)
        return out

    class Note(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            nonlocal began
            began = time.monotonic()

        def on_step_end(self, args: Any, state: Any, *rest: Any, **kwargs: Any) -> None:
            mean = sum(rewards) / len(rewards)
            steps.append({"step": state.global_step, "reward": mean, "seconds": time.monotonic() - began})
            rewards.clear()
            Path(options.out).write_text("".join(json.dumps(step) + "\n" for step in steps))

    batch = options.prompts * options.replies
    config = GRPOConfig(
        output_dir=folder, seed=seed, max_steps=options.steps, per_device_train_batch_size=batch,
        gradient_accumulation_steps=1, num_generations=options.replies, max_completion_length=options.new,
        learning_rate=options.lr, lr_scheduler_type="constant", warmup_steps=0, weight_decay=0.0, max_grad_norm=1.0,
        adam_beta1=BETAS[0], adam_beta2=BETAS[1], beta=0.0, epsilon=0.2, loss_type="dapo", scale_rewards="group",
        temperature=1.0, top_p=1.0, num_iterations=1, bf16=gpu, use_cpu=not gpu, report_to="none", save_strategy="no",
        logging_strategy="no", disable_tqdm=True, gradient_checkpointing=False, shuffle_dataset=True,
    )  # fmt: skip
    data = [{"prompt": [{"role": "user", "content": row.messages[0].content}], "row": row.id} for row in rows.values()]
    trainer = GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(options.start, dtype=torch.float32),
        reward_funcs=right, args=config, train_dataset=datasets.Dataset.from_list(data),
        processing_class=AutoTokenizer.from_pretrained(options.start), callbacks=[Note()],
    )  # fmt: skip
    trainer.train()
    return steps


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--start", default="", help="the SFT model that both start from; not given: made here")
    parser.add_argument("--out", default="trl-learn", help="folder, or with --alone file, of the rewards by step")
    parser.add_argument("--alone", choices=("ours", "trl", "sft"), help="one run (or the SFT) in this process")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--sft-steps", type=int, default=15)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--replies", type=int, default=8)
    parser.add_argument("--new", type=int, default=48, help="most ids of a reply")
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--lr", type=float, default=5e-6)
    parser.add_argument("--memory-gb", type=float, default=0.0, help="of the GPU, for our run beside others")
    return parser.parse_args()


def alone(options: argparse.Namespace) -> int:
    """One run, or the SFT, whose checkpoint stays at --out."""
    if options.alone == "sft":
        train_ours(options, options.seeds[0], options.out)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        steps = {"ours": ours, "trl": trl}[options.alone](options, options.seeds[0], folder)
    Path(options.out).write_text("".join(json.dumps(step) + "\n" for step in steps))
    return 0


def main() -> int:
    """The SFT, then every run one after the other, each in a process of its own."""
    options = arguments()
    if options.alone:
        return alone(options)
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)

    def run(way: str, seed: int, start: str, target: Path) -> None:
        more = ["--start", start] if start else []
        command = [
            sys.executable,
            __file__,
            *sys.argv[1:],
            "--alone",
            way,
            "--seeds",
            str(seed),
            *more,
            "--out",
            str(target),
        ]
        subprocess.run(command, check=True)

    start = options.start
    if not start:
        run("sft", 0, "", out / "sft")
        start = str(sorted((out / "sft" / "checkpoints").glob("*-0*"))[-1])
    for seed in options.seeds:
        for way in ("ours", "trl"):
            target = out / f"{way}-{seed}.jsonl"
            run(way, seed, start, target)
            steps = [json.loads(line) for line in target.read_text().splitlines()]
            last = [step["reward"] for step in steps[-10:]]
            print(
                f"{way:5} seed {seed}: {sum(last) / len(last):.3f} over the last 10 steps, {steps[-1]['seconds']:.0f} s"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
