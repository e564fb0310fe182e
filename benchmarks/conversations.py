"""Conversations per second of one simulated GRPO step, compared with the order in which the published recipe plays it.

    python benchmarks/conversations.py                 # 16 prompts x 8 replies x 3 futures x 2 rounds, 50 ms per call
    python benchmarks/conversations.py --no-http       # only in process, not over HTTP on loopback

Every model call takes the same latency, so the longest chain of calls (the critical path) is known: one reply, then a
user and a policy call per round, then a judge. Prints seconds, conversations/s, the ratio to the critical path, this
process's CPU time per call, and the ratio to *sequential futures*. That is the published recipe's order: replies run
concurrently, but the futures of a reply run one after another, and so do the metrics of a future.
If the package verifiers (0.1) is installed, its multi-turn environment, with its user in process, is also measured over
HTTP.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from upshot.config.model_spec import ModelSpec
from upshot.config.sampling import Sampling
from upshot.core.conversation import Message, Row
from upshot.models.base import Model, Request
from upshot.models.connect import connect
from upshot.models.scripted import ScriptedModel
from upshot.rewards.build import build_metric
from upshot.rewards.credit import MetricWeight, combine
from upshot.rollout.episode import Policy, play_future
from upshot.rollout.futures.talk import Talk
from upshot.rollout.play import RolloutContext, play_step
from upshot.tasks.users.llm import LLMUser

USER = json.dumps({"current_answer": "none yet", "thought": "hm", "response": "And what about the second part?"})
JUDGES = {key: json.dumps({"thought": "fine", key: 1}) for key in ("accuracy", "interactivity")}


def answer(prompt: str) -> str:
    """What the scripted models say, depending on their prompt."""
    if prompt.startswith("You play a person"):
        return USER
    for key, text in JUDGES.items():
        if f'"{key}":' in prompt:
            return text
    return "Let us take it step by step. Which part is unclear?"


def make_rows(prompts: int) -> list[Row]:
    """Rows with a goal and a reference."""
    return [
        Row(f"row{i}", (Message("user", "Can you help me?"),), f"Add {i} and {i}.", str(2 * i)) for i in range(prompts)
    ]


def make_stage(model: Model, options: argparse.Namespace) -> RolloutContext:
    """One model in all three roles, two judged metrics."""
    metrics = {name: build_metric(name, judge=model) for name in JUDGES}
    weights = {name: MetricWeight(1.0, (-1.0, 1.0), metric.intrinsic) for name, metric in metrics.items()}
    policy = Policy(model, sampling=Sampling(max_tokens=64))
    return RolloutContext(policy, Talk(metrics, weights, LLMUser(model), options.futures, options.rounds))


async def upshot_step(context: RolloutContext, options: argparse.Namespace) -> None:
    """One step as Upshot plays it."""
    groups = await play_step(context, make_rows(options.prompts), options.replies, seed=0)
    assert all(reply.reward.total.value == 2.0 for group in groups for reply in group)


async def sequential_step(context: RolloutContext, options: argparse.Namespace) -> None:
    """One step in the published recipe's order: replies at once, futures and metrics one after another."""
    from upshot.core.conversation import Conversation, derive_seed

    async def one(row: Row, index: int) -> None:
        conversation = Conversation(row, derive_seed(0, row.id, index))
        await context.policy.reply(conversation)
        scores = []
        for number in range(options.futures):
            fork = conversation.fork("future", number)
            assert isinstance(context.futures, Talk) and context.futures.user is not None
            await play_future(fork, context.futures.user, context.policy, options.rounds)
            scores.append({name: await metric.score(fork) for name, metric in context.futures.metrics.items()})
        assert combine(scores, context.futures.weights).total.value == 2.0

    async with asyncio.TaskGroup() as tasks:
        for row in make_rows(options.prompts):
            for index in range(options.replies):
                tasks.create_task(one(row, index))


def scripted_model(options: argparse.Namespace) -> Model:
    """An in-process model that takes its time."""

    def reply(request: Request) -> str:
        return answer(request.prompt[0].content if len(request.prompt) == 1 else "")  # type: ignore[union-attr]

    spec = ModelSpec(model="scripted:ok", latency_s=options.latency, concurrency=options.in_flight)
    return ScriptedModel(spec, reply)


def serve(options: argparse.Namespace) -> None:
    """The server's process: answers after the latency, prints its address first."""
    from tests.models.misbehaving_server import MisbehavingServer

    async def main() -> None:
        def reply(body: dict[str, Any]) -> str:
            messages = body["messages"]
            return answer(messages[0]["content"] if len(messages) == 1 else "")

        async with MisbehavingServer(reply, latency=options.latency[0], keep_bodies=False) as server:
            print(server.url, flush=True)
            await asyncio.sleep(3600)

    asyncio.run(main())


async def measure(
    play: Callable[[RolloutContext, argparse.Namespace], Awaitable[None]], model: Model, options: argparse.Namespace
) -> tuple[float, float]:
    """Wall and CPU seconds of one step, after a small one that warms imports and connections."""
    small = argparse.Namespace(**{**vars(options), "prompts": 2, "replies": 2})
    await play(make_stage(model, small), small)
    context = make_stage(model, options)
    wall, cpu = time.perf_counter(), time.process_time()
    await play(context, options)
    return time.perf_counter() - wall, time.process_time() - cpu


async def compare(model: Model, options: argparse.Namespace, label: str) -> float:
    """Print Upshot beside sequential futures; conversations/s of Upshot."""
    conversations = options.prompts * options.replies * options.futures
    calls = options.prompts * options.replies + conversations * (2 * options.rounds + len(JUDGES))
    path = options.latency * (1 + 2 * options.rounds + 1)
    print(f"{label}: {conversations} conversations, {calls} calls of {options.latency * 1000:.0f} ms, "
          f"{options.in_flight} in flight, critical path {path:.2f} s")  # fmt: skip
    walls = {}
    for name, play in (("upshot", upshot_step), ("sequential futures", sequential_step)):
        runs = [await measure(play, model, options) for _ in range(options.repeat)]
        wall, cpu = min(runs)
        walls[name] = wall
        print(f"  {name:<20}{wall:7.2f} s {conversations / wall:8.0f} conv/s {wall / path:6.2f} x path "
              f"{cpu / calls * 1000:6.3f} ms CPU/call")  # fmt: skip
    print(f"  ratio: upshot is {walls['sequential futures'] / walls['upshot']:.2f} x as fast as sequential futures")
    return conversations / walls["upshot"]


async def beside_verifiers(url: str, options: argparse.Namespace, ours: float) -> None:
    """The same conversations by verifiers' multi-turn environment: its user and judges call the same server.

    It has no forks, so every conversation also plays the first reply itself: 7 calls instead of 6 1/3.
    """
    if importlib.util.find_spec("verifiers") is None:
        print("  verifiers: not installed, not measured")
        return
    import openai
    import verifiers as vf
    from datasets import Dataset

    client = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0)

    async def ask(prompt: str) -> str:
        message = {"role": "user", "content": prompt}
        done = await client.chat.completions.create(model="test-model", messages=[message])  # type: ignore[list-item]
        return done.choices[0].message.content or ""

    class SimulatedUser(vf.MultiTurnEnv):  # type: ignore[misc]
        async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
            prompt = "You play a person\n" + "\n".join(str(m["content"]) for m in messages)
            return [{"role": "user", "content": json.loads(await ask(prompt))["response"]}]

    async def accuracy(prompt: Any, completion: Any, **_: Any) -> float:
        return float(json.loads(await ask(f'"accuracy": {completion}'))["accuracy"])

    async def interactivity(prompt: Any, completion: Any, **_: Any) -> float:
        return float(json.loads(await ask(f'"interactivity": {completion}'))["interactivity"])

    number = options.prompts * options.replies * options.futures
    rows = [{"prompt": [{"role": "user", "content": f"Can you help me? {i}"}], "answer": str(i)} for i in range(number)]
    walls = []
    for _ in range(options.repeat):
        environment = SimulatedUser(
            dataset=Dataset.from_list(rows),
            rubric=vf.Rubric(funcs=[accuracy, interactivity], weights=[1.0, 1.0]),
            max_turns=options.rounds + 1,
        )
        began, cpu = time.perf_counter(), time.process_time()
        inputs = environment.get_dataset()
        out = await environment.generate(inputs, client, "test-model", max_concurrent=options.in_flight, use_tqdm=False)
        walls.append((time.perf_counter() - began, time.process_time() - cpu))
        assert list(out["reward"]) == [2.0] * number
    wall, cpu = min(walls)
    calls = number * (2 * options.rounds + 1 + len(JUDGES))
    print(
        f"  {'verifiers':<20}{wall:7.2f} s {number / wall:8.0f} conv/s {'':>13} {cpu / calls * 1000:6.3f} ms CPU/call"
    )
    print(f"  ratio: upshot plays {ours / (number / wall):.2f} x as many conversations/s as verifiers {vf.__version__}")


async def over_http(options: argparse.Namespace) -> None:
    """The same with a server in a process of its own."""
    command = [sys.executable, __file__, "--serve", "--latency", str(options.latency)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        try:
            async with connect({"url": url, "concurrency": options.in_flight}) as model:
                ours = await compare(model, options, "over HTTP")
            await beside_verifiers(url, options, ours)
        finally:
            server.kill()


async def main(options: argparse.Namespace) -> None:
    """Run what was asked for."""
    for latency in options.latency:
        chosen = argparse.Namespace(**{**vars(options), "latency": latency})
        async with scripted_model(chosen) as model:
            await compare(model, chosen, "in process")
        if options.http:
            await over_http(chosen)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--replies", type=int, default=8)
    parser.add_argument("--futures", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--latency", type=float, nargs="+", default=[0.05, 0.5], help="seconds each model call takes")
    parser.add_argument("--in-flight", type=int, default=512)
    parser.add_argument("--repeat", type=int, default=3, help="the fastest of so many runs counts")
    parser.add_argument("--http", action=argparse.BooleanOptionalAction, default=True, help="over real HTTP, too")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    chosen = parse()
    if chosen.serve:
        serve(chosen)
    else:
        asyncio.run(main(chosen))
