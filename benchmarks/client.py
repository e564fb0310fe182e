"""Calls per second and CPU per call: our endpoint client, litellm's `acompletion` and the `openai` client.

One server in another process (loopback, fixed latency), the same messages, the same number in flight, rounds in turn:
    python benchmarks/client.py [--calls 1500] [--in-flight 256] [--latency 0.02] [--rounds 3]
The server and other work on the machine limit calls/s; CPU per call counts only the client process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
SERVER = ROOT / "tests" / "models" / "misbehaving_server.py"
MODEL = "test-model"
MESSAGES = [
    {"role": "system", "content": "You are a helpful assistant. " * 20},
    {"role": "user", "content": "Could you help me plan a short trip? " * 10},
]

Call = Callable[[], Awaitable[str]]


def ours(url: str, in_flight: int) -> tuple[Call, Callable[[], Awaitable[None]]]:
    """Our client, with its limits, counters and budget on; retries cost nothing when nothing fails."""
    from upshot.config.sampling import Sampling
    from upshot.core.conversation import messages_from
    from upshot.models.base import Request
    from upshot.models.connect import connect

    model = connect({"url": url, "model": MODEL, "concurrency": in_flight}, role="user")
    request = Request(messages_from(MESSAGES), Sampling(max_tokens=64, seed=1), role="user")
    started = False

    async def call() -> str:
        nonlocal started
        if not started:
            started = True
            await model.start()
        return (await model.generate(request))[0].text

    return call, model.aclose


def litellm_client(url: str, in_flight: int) -> tuple[Call, Callable[[], Awaitable[None]]]:
    """litellm as its documentation calls it, without retries."""
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    import litellm

    litellm.suppress_debug_info = True
    slots = asyncio.Semaphore(in_flight)

    async def call() -> str:
        async with slots:
            answer = await litellm.acompletion(
                model=f"openai/{MODEL}",
                messages=MESSAGES,
                api_base=url,
                api_key="x",
                max_tokens=64,
                seed=1,
                num_retries=0,
            )
        return answer.choices[0].message.content

    async def close() -> None:
        return None

    return call, close


def openai_client(url: str, in_flight: int) -> tuple[Call, Callable[[], Awaitable[None]]]:
    """The official client."""
    import openai

    # its default of 5 s for a connection is too short for 256 at once on a busy machine
    client = openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0, timeout=600.0)
    slots = asyncio.Semaphore(in_flight)

    async def call() -> str:
        async with slots:
            answer = await client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=64, seed=1)
        return answer.choices[0].message.content

    return call, client.close


CLIENTS = {"upshot": ours, "litellm": litellm_client, "openai": openai_client}


async def measure(call: Call, calls: int) -> tuple[float, float]:
    """(calls per second, CPU milliseconds per call)."""
    began, cpu = time.perf_counter(), time.process_time()
    texts = await asyncio.gather(*(call() for _ in range(calls)))
    wall, cpu = time.perf_counter() - began, time.process_time() - cpu
    assert all(text == MESSAGES[-1]["content"] for text in texts)
    return calls / wall, cpu / calls * 1e3


async def compare(url: str, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Median of the rounds, client by client; every client is warmed up first."""
    clients = {name: make(url, options.in_flight) for name, make in CLIENTS.items() if name in options.clients}
    results: dict[str, list[tuple[float, float]]] = {name: [] for name in clients}
    for call, _ in clients.values():
        await call()
        await asyncio.gather(*(call() for _ in range(options.in_flight)))
    for _ in range(options.rounds):
        for name, (call, _) in clients.items():
            # fewer of the slow ones: the rate does not depend on how many are measured
            results[name].append(await measure(call, options.calls if name == "upshot" else max(1, options.calls // 3)))
    for _, close in clients.values():
        await close()
    return {
        name: {
            "calls_per_s": statistics.median(rate for rate, _ in rounds),
            "cpu_ms_per_call": statistics.median(cpu for _, cpu in rounds),
        }
        for name, rounds in results.items()
    }


def main() -> int:
    """Print the table and the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=1500)
    parser.add_argument("--in-flight", type=int, default=256)
    parser.add_argument("--latency", type=float, default=0.02, help="seconds per reply of the server")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", nargs="+", choices=list(CLIENTS), default=list(CLIENTS))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    server = subprocess.Popen(
        [sys.executable, str(SERVER), "--latency", str(options.latency)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        results = asyncio.run(compare(server.stdout.readline().strip(), options))
    finally:
        server.terminate()
        server.wait()
    if options.json:
        print(json.dumps(results))
        return 0
    print(f"{options.in_flight} in flight, {options.latency * 1e3:g} ms latency, median of {options.rounds} rounds")
    for name, result in results.items():
        print(f"{name:>8}: {result['calls_per_s']:8.0f} calls/s  {result['cpu_ms_per_call']:6.2f} ms CPU per call")
    mine = results.get("upshot")
    for name, other in results.items():
        if mine and name != "upshot":
            rate = mine["calls_per_s"] / other["calls_per_s"]
            cpu = other["cpu_ms_per_call"] / mine["cpu_ms_per_call"]
            print(f"upshot is {rate:.1f} x {name} in calls/s, at 1/{cpu:.1f} of its CPU per call")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
