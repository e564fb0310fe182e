"""A whole GRPO step of ours, play and learn. For a comparison with TRL's on the same machine: `trl_step.py`.

    python benchmarks/grpo_step.py                  # GPU: SmolLM2-135M's shape, 16 prompts x 8 replies of 256 ids
    python benchmarks/grpo_step.py --collabllm      # GPU: 8B with LoRA; 3 futures of 2 rounds with a scripted user
    python benchmarks/grpo_step.py --collabllm --tree 1 0.25   # and learning along the tree, from all and some forks
    python benchmarks/grpo_step.py --collabllm --weights fp8   # and sampling in 8 bits
    python benchmarks/grpo_step.py --collabllm --user-ms 500   # its user answers after 500 ms; what the GPU waits for
    python benchmarks/grpo_step.py --shape tiny     # CPU, in seconds

Random weights and no end ids, so that every reply has its full length. A step samples, continues and scores replies,
sets advantages and makes one update. Prints the first step (kernels compiled, graphs captured), the best of the later
ones and where its time goes.

With --user-ms replies end at random, with mean length --new and at most three times that; otherwise all of them would
wait for the user at the same moments. The last step's sampling is then analysed: the share of it in which the engine
had nothing to do, or less than a tenth of the rows, and how many seconds of learning could have been done in those gaps
if a group were learned from as soon as its last reply is scored.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.learn import SHAPES, build
from upshot.config.recipe import CreditConfig, ImportanceConfig, Named, TrainConfig
from upshot.config.sampling import Sampling
from upshot.core.conversation import Conversation, Message, Row
from upshot.core.score import Score
from upshot.engine.engine import Engine, EngineSettings
from upshot.models.engine_model import EngineModel
from upshot.models.local import collect_rarely
from upshot.models.rendering import Renderer
from upshot.models.tiny import tiny_tokenizer
from upshot.rewards.credit import MetricWeight
from upshot.rewards.metric import Metric
from upshot.rollout.episode import Policy
from upshot.rollout.futures.talk import Talk
from upshot.rollout.play import RolloutContext, play_step
from upshot.tasks.participants.base import Observation
from upshot.tasks.users.scripted import ScriptedUser
from upshot.training.learner.learner import Learner
from upshot.training.loops.rl import learn, prepare

SPECIALS = 7
"""Ids of the tokenizer that are no words."""


class Parity(Metric):
    """A verdict that costs nothing and differs from reply to reply."""

    async def score(self, conversation: Conversation) -> Score:
        """1 or 0."""
        return Score(float(sum(map(ord, conversation.turns[-1].message.content)) % 2))


class SlowUser(ScriptedUser):
    """A user behind an endpoint: its lines come after a while."""

    delay = 0.5

    async def observe(self, conversation: Conversation) -> Observation:
        """The next line, late."""
        await asyncio.sleep(self.delay)
        return await super().observe(conversation)


class Timeline:
    """When the engine computed, for how many rows, and whether anything was left to do; when groups were done."""

    def __init__(self, engine: Engine, groups: int) -> None:
        self.spans: list[tuple[float, float, int, bool]] = []
        self.finished = [0.0] * groups
        plain = engine.step

        def step(*args: Any, **kwargs: Any) -> Any:
            began, rows = time.perf_counter(), len(engine.scheduler.running) + len(engine.scheduler.waiting)
            try:
                return plain(*args, **kwargs)
            finally:
                self.spans.append((began, time.perf_counter(), rows, engine.scheduler.busy))

        engine.step = step  # type: ignore[method-assign]

    def reply(self, rollout: Any) -> None:
        """A reply and its futures are scored."""
        self.finished[rollout.group] = time.perf_counter()

    def report(self, began: float, ended: float, learn: float) -> dict[str, float]:
        """Shares of the time between, and the seconds of `learn` that its gaps had room for."""
        spans = [span for span in self.spans if span[0] >= began]
        gaps = [(a[1], b[0]) for a, b in pairwise(spans) if not a[3]] + [(spans[-1][1], ended)]
        few = max(rows for _, _, rows, _ in spans) / 10
        thin = sum(end - start for start, end, rows, _ in spans if rows < few)
        each, spent = learn / len(self.finished), 0.0
        for start, end in gaps:
            for ready in [start, *sorted(t for t in self.finished if start < t < end)]:
                room = end - ready
                spent += max(0.0, min(room, each * sum(t <= ready for t in self.finished) - spent))
        whole = ended - began
        idle = sum(end - start for start, end in gaps)
        first = min(self.finished) - began
        return {
            "idle": idle / whole,
            "few rows": thin / whole,
            "first group s": first,
            "could learn s": min(spent, idle),
        }


def words(start: int, count: int, vocab: int) -> str:
    """Some words that the tokenizer knows."""
    return " ".join(f"w{(start * 37 + j * 11) % (vocab - SPECIALS)}" for j in range(count))


def now(device: torch.device) -> float:
    """Seconds, when the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


async def ours(
    options: argparse.Namespace, device: torch.device, forks: float = 0.0, weights: Any = "model"
) -> dict[str, Any]:
    """Steps of our loop; `forks`: the share of the futures' forks that is learned from too."""
    vocab = SHAPES[options.shape]["vocab"]
    tokenizer = tiny_tokenizer([f"w{n}" for n in range(vocab - SPECIALS)])
    module = build(options.shape, device)
    room = options.kv_gb << 30 if device.type == "cuda" else 1 << 28
    kv = options.kv if weights == "fp8" else "model"
    settings = EngineSettings(kv_bytes=room, weights=weights, kv=kv)
    model = EngineModel(Engine(module, set(), settings), tokenizer, "policy", Renderer(tokenizer))
    # Random weights give every id about the same probability.
    model.end_ids = set(range(vocab - max(1, vocab // options.new), vocab)) if options.user_ms else set()
    policy = Policy(model, Renderer(tokenizer), Sampling(options.new * (3 if options.user_ms else 1)))
    lines = [words(1000 + n, 32, vocab) for n in range(options.rounds)]
    speaker = SlowUser if options.user_ms else ScriptedUser
    SlowUser.delay = options.user_ms / 1000
    user = speaker(lines, leave_when_answered=False) if options.rounds else None
    credit = CreditConfig(by="tree", forks=forks) if forks else None
    futures = Talk({"m": Parity()}, {"m": MetricWeight()}, user, options.samples, options.rounds, credit)
    context = RolloutContext(policy, futures)
    rule = "truncate" if weights == "fp8" else "none"
    config = TrainConfig(
        advantage=Named(name="grpo"), token_budget=options.token_budget, lr=1e-6, importance=ImportanceConfig(rule=rule)
    )
    learner = Learner(module, tokenizer, config, policy.sampling.max_tokens, changed=model.engine.weights_changed)
    rows = [Row(f"r{i}", (Message("user", words(i, options.prompt, vocab)),)) for i in range(options.prompts)]
    line = Timeline(model.engine, options.prompts) if options.user_ms else None
    gc.collect()
    collect_rarely()  # as in a run
    steps = []
    for number in range(options.repeats + 1):
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        began = now(device)
        groups = await play_step(context, rows, options.replies, number, line.reply if line else None)
        played = now(device)
        logs = learn(learner, groups, number, prepare)
        ended = now(device)
        memory = torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else 0.0
        steps.append({"sample": played - began, "learn": ended - played, "step": ended - began, "peak_gb": memory})
    best = min(steps[1:], key=lambda step: step["step"])
    found = {"first step": steps[0], "step": best, "trained tokens": logs["train/tokens"]}
    found |= {name: logs[name] for name in ("policy/kl_to_sampler", "policy/drift", "policy/drift_max")}
    return found | {"last step": steps[-1], "tail": line.report(began, played, ended - played)} if line else found


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--collabllm", action="store_true", help="8B with LoRA, 3 futures of 2 rounds")
    parser.add_argument("--tree", type=float, nargs="*", default=[], help="also along the tree: shares of the forks")
    parser.add_argument("--weights", choices=["model", "fp8"], default="model", help="fp8: also sampled in 8 bits")
    parser.add_argument("--kv", choices=["model", "fp8"], default="model", help="fp8: keys and values, too, with it")
    add_sizes(parser)
    return settle(parser.parse_args())


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """The sizes of a step."""
    parser.add_argument("--user-ms", type=int, default=0, help="milliseconds that the user takes for an answer")
    parser.add_argument("--shape", choices=SHAPES, default="")
    parser.add_argument("--prompts", type=int, default=0)
    parser.add_argument("--replies", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=0, help="words of a prompt")
    parser.add_argument("--new", type=int, default=0, help="ids of a reply")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--token-budget", type=int, default=0)
    parser.add_argument("--kv-gb", type=int, default=16)


def settle(options: argparse.Namespace) -> argparse.Namespace:
    """Fill in the settings that were left open, depending on the shape."""
    small = options.shape in ("tiny", "quickstart")
    options.shape = options.shape or ("8b" if options.collabllm else "135m")
    options.samples, options.rounds = (3, 2) if options.collabllm else (1, 0)
    options.prompts = options.prompts or (2 if small else 16)
    options.prompt = options.prompt or (16 if small else 512 if options.collabllm else 128)
    options.new = options.new or (16 if small else 256)
    options.token_budget = options.token_budget or (8192 if options.shape == "8b" else 16384)
    return options


def _clear(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def main() -> int:
    """Run and print."""
    options = arguments()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    out: dict[str, Any] = {"shape": options.shape, "device": device.type, "ours": asyncio.run(ours(options, device))}
    print(json.dumps(out, indent=1), flush=True)
    _clear(device)
    if options.weights == "fp8":
        narrow = asyncio.run(ours(options, device, weights="fp8"))
        ratio = narrow["step"]["step"] / out["ours"]["step"]["step"]
        print(json.dumps({"weights": "fp8", "ours": narrow, "ratio": ratio}, indent=1), flush=True)
        _clear(device)
    for forks in options.tree:
        along = asyncio.run(ours(options, device, forks))
        ratio = along["step"]["step"] / out["ours"]["step"]["step"]
        print(json.dumps({"tree": forks, "ours": along, "ratio": ratio}, indent=1), flush=True)
        _clear(device)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
