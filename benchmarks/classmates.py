"""A classmate step on one device: policy and classmates in one process, compared with calls to one server at a time.

    python benchmarks/classmates.py                                   # GPU: 135M policy; 135M, 360M and 1.1B classmates
    python benchmarks/classmates.py --shapes mini mini mini --prompts 2 --replies 2 --new 16   # CPU

Random weights. The policy's replies consist only of thoughts; every classmate samples R answers to each. Prints the
time of the whole step and of its parts, and the tokens per second of the classmates in process (all at once) and of the
same calls sent over HTTP to one `upshot` server per classmate, one server after the other.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

SHAPES: dict[str, dict[str, int]] = {
    "mini": {"layers": 2, "hidden": 64, "heads": 4, "kv": 2, "mlp": 128},
    "135m": {"layers": 30, "hidden": 576, "heads": 9, "kv": 3, "mlp": 1536},
    "360m": {"layers": 32, "hidden": 960, "heads": 15, "kv": 5, "mlp": 2560},
    "1.1b": {"layers": 16, "hidden": 2048, "heads": 32, "kv": 8, "mlp": 8192},
}
WORDS = 49152 - 16
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think> {% endif %}"
)


def make(shape: str, order: int, device: str) -> tuple[Any, Any]:
    """A model of random weights and a tokenizer that numbers its words in a different order."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from upshot.models.tiny import tiny_tokenizer

    words = ["<think>", "</think>", *(f"w{n}" for n in range(WORDS))]
    tokenizer = tiny_tokenizer(words[order:] + words[:order])
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(order)
    size = SHAPES[shape]
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=size["hidden"],
        intermediate_size=size["mlp"],
        num_hidden_layers=size["layers"],
        num_attention_heads=size["heads"],
        num_key_value_heads=size["kv"],
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        initializer_range=0.04,
    )
    with torch.device(device):
        module = LlamaForCausalLM(config)
    return module.to(torch.bfloat16 if device == "cuda" else torch.float32).eval(), tokenizer


def engine_model(shape: str, order: int, device: str, name: str, **settings: Any) -> Any:
    """A model in this process; no end ids, so that every completion has its full length."""
    from upshot.engine.engine import Engine, EngineSettings
    from upshot.models.engine_model import EngineModel
    from upshot.models.rendering import Renderer

    module, tokenizer = make(shape, order, device)
    engine = Engine(module, set(), EngineSettings(**settings))
    model = EngineModel(engine, tokenizer, name, Renderer(tokenizer))
    model.end_ids = set()
    return model


def serve(shape: str, order: int, device: str, port: int) -> None:
    """One classmate as a server process."""
    import uvicorn

    from upshot.serving.openai.server import OpenAIServer

    model = engine_model(shape, order, device, f"c{order}", kv_bytes=(8 << 30) if device == "cuda" else 0)
    uvicorn.run(OpenAIServer(model).app, host="127.0.0.1", port=port, log_level="error")


async def main(options: argparse.Namespace) -> dict[str, Any]:
    """Measure."""
    import torch

    from upshot.config.recipe import Named, TrainConfig
    from upshot.config.sampling import Sampling
    from upshot.core.conversation import Message, Row
    from upshot.core.score import Score
    from upshot.models.base import Model
    from upshot.models.connect import connect
    from upshot.models.rendering import Renderer
    from upshot.rewards.credit import MetricWeight
    from upshot.rewards.metric import Metric
    from upshot.rollout.dependencies import FutureDependencies
    from upshot.rollout.episode import Policy
    from upshot.rollout.futures.classmates.classmate import ClassmateConfig
    from upshot.rollout.futures.classmates.futures import Classmates
    from upshot.rollout.futures.classmates.options import ClassmatesOptions
    from upshot.rollout.play import RolloutContext, play_step
    from upshot.rollout.reply import Rollout
    from upshot.tasks.base import Task
    from upshot.training.learner.learner import Learner
    from upshot.training.loops.rl import learn, prepare

    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = [
        Row(f"r{i}", (Message("user", " ".join(f"w{(i * 37 + j * 11) % WORDS}" for j in range(options.prompt))),))
        for i in range(options.prompts)
    ]

    class Words(Task):
        """Any words."""

        name = "words"

        def rows(self, split: str) -> list[Row]:
            return rows

    class Parity(Metric):
        """A verdict that costs nothing."""

        async def score(self, conversation: Any) -> Score:
            return Score(float(len(conversation.turns[-1].message.content) % 2))

    policy_model = engine_model(options.policy, 0, device, "policy", kv_bytes=(16 << 30) if device == "cuda" else 0)
    names = [f"c{n}" for n in range(1, len(options.shapes) + 1)]
    memory = (16 << 30) if device == "cuda" else 0
    peers: dict[str, Model] = {
        name: engine_model(shape, n, device, name, own_stream=not options.one_stream, kv_bytes=memory)
        for n, (name, shape) in enumerate(zip(names, options.shapes, strict=True), 1)
    }
    renderer = Renderer(policy_model.tokenizer)
    policy = Policy(policy_model, renderer, Sampling(options.new))

    def futures(models: dict[str, Model]) -> Classmates:
        configs = [ClassmateConfig(name=name, tokenizer=None) for name in models]
        made = Classmates(
            FutureDependencies(
                task=Words(), models=models, metrics={"m": Parity()}, weights={"m": MetricWeight()}, renderer=renderer
            ),
            ClassmatesOptions(configs, samples=options.samples, max_tokens=options.new, metric="token_amount"),
        )
        made.panel.metric = Parity()
        return made

    def synchronise() -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    context = RolloutContext(policy, futures(peers))
    await context.futures.start()
    learner = Learner(
        policy_model.engine.model.train(), policy_model.tokenizer,
        TrainConfig(advantage=Named(name="dr-grpo"), token_budget=options.token_budget), max_tokens=options.new,
        changed=policy_model.engine.weights_changed,
    )  # fmt: skip
    per_reply = options.samples * options.new
    classmate_tokens = options.prompts * options.replies * len(peers) * per_reply
    out: dict[str, Any] = {"device": device, "classmate tokens a step": classmate_tokens}

    steps: list[dict[str, float]] = []
    for number in range(options.repeats + 1):
        started = synchronise()
        groups = await play_step(context, rows, options.replies, number)
        played = synchronise()
        learn(learner, groups, number, prepare)
        ended = synchronise()
        steps.append({"rollout": played - started, "learn": ended - played, "step": ended - started})
    out["first step"] = steps[0]
    out["step"] = min(steps[1:], key=lambda s: s["step"])

    replies = [reply for group in groups for reply in group]

    async def continue_all(with_: Classmates, one_by_one: bool) -> float:
        """All classmates' answers to the last step's thoughts: all at once, or one classmate after the other."""
        await with_.start()
        best = float("inf")
        for _ in range(options.repeats + 1):
            started = synchronise()
            turns = [[c] for c in with_.panel.classmates] if one_by_one else [with_.panel.classmates]
            everybody = with_.panel.classmates
            for some in turns:
                with_.panel.classmates = some
                found = await asyncio.gather(*(with_._continue(Rollout(r.conversation)) for r in replies))
                assert all(f.missing is None for own in found for f in own), "a call failed"
            with_.panel.classmates = everybody
            best = min(best, synchronise() - started)
        return best

    out["policy alone"] = await sample_alone(policy, rows, options, synchronise)
    out["in process, at once"] = await continue_all(futures(peers), False)
    out["in process, one after the other"] = await continue_all(futures(peers), True)
    for peer in peers.values():
        peer.engine.runner = None  # type: ignore[attr-defined]
    peers.clear()
    context.futures = None  # type: ignore[assignment]
    if device == "cuda":
        torch.cuda.empty_cache()

    print(json.dumps(out, indent=1), flush=True)
    context = multiprocessing.get_context("spawn")
    ports = [options.port + n for n in range(len(names))]
    servers = [
        context.Process(target=serve, args=(shape, n, device, port), daemon=True)
        for n, (shape, port) in enumerate(zip(options.shapes, ports, strict=True), 1)
    ]
    for server in servers:
        server.start()
    try:
        with tempfile.TemporaryDirectory() as folder:
            served = {}
            for n, (name, port) in enumerate(zip(names, ports, strict=True), 1):
                spec = {"url": f"http://127.0.0.1:{port}/v1", "model": name, "retries": 200, "backoff_s": 0.5,
                        "concurrency": 1024, "timeout_s": 600}  # fmt: skip
                served[name] = connect(spec)
                await served[name].start()
                _, tokenizer = make("mini", n, "cpu")
                tokenizer.save_pretrained(f"{folder}/{name}")
            far = futures(served)
            for classmate in far.panel.classmates:
                classmate.config = classmate.config.model_copy(update={"tokenizer": f"{folder}/{classmate.name}"})
            out["servers, one after the other"] = await continue_all(far, True)
            out["servers, at once"] = await continue_all(far, False)
            for model in served.values():
                await model.aclose()
    finally:
        for server in servers:
            server.kill()
    for key in [key for key in out if key.startswith(("in process", "servers"))]:
        out[f"tokens/s {key}"] = round(classmate_tokens / out[key])
    out["ratio at once : servers in turn"] = out["servers, one after the other"] / out["in process, at once"]
    return out


async def sample_alone(policy: Any, rows: Any, options: argparse.Namespace, synchronise: Any) -> float:
    """Seconds that the policy's own replies take."""
    from upshot.core.conversation import Conversation

    started = synchronise()
    talks = [Conversation(row, seed) for seed in range(options.replies) for row in rows]
    await asyncio.gather(*(policy.reply(talk) for talk in talks))
    return float(synchronise() - started)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", choices=SHAPES, default="135m")
    parser.add_argument("--shapes", choices=SHAPES, nargs="+", default=["135m", "360m", "1.1b"])
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--replies", type=int, default=8)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--token-budget", type=int, default=16384)
    parser.add_argument("--one-stream", action="store_true", help="all classmates on one CUDA stream, in turn")
    parser.add_argument("--port", type=int, default=8701)
    return parser.parse_args()


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    print(json.dumps(asyncio.run(main(arguments())), indent=1))
