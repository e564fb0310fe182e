"""Three replicas of a server, one of them stopped (SIGSTOP) for a while: calls per second compared with all three.

    python -m benchmarks.replicas [--seconds 10] [--conversations 24]

The servers are real ones (`upshot serve FILE.yaml`, a tiny model on the CPU). Conversations of four turns go on
throughout; the rounds with and without a stopped replica alternate in one run. Also prints the statistics of the
servers' prefix caches.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from upshot.config.model_spec import ModelSpec
from upshot.config.recipe import TinyConfig
from upshot.config.sampling import Sampling
from upshot.core.conversation import Message
from upshot.models.base import Model, ModelCallError, Request
from upshot.models.connect import connect
from upshot.models.tiny import tiny_model, tiny_tokenizer
from upshot.serving.servers.state import folder_of, read_state, ready, with_addresses
from upshot.tasks.slots import SlotsTask

TURNS, TOKENS = 4, 16


class Load:
    """Conversations that never end, and the results of their calls."""

    def __init__(self, model: Model, words: list[str]) -> None:
        self.model, self.words = model, words
        self.answered = self.failed = 0
        self.latencies: list[float] = []

    async def talk(self, number: int) -> None:
        """One conversation after the other."""
        count = 0
        while True:
            opening = " ".join(self.words[(number * 31 + count * 7 + i) % len(self.words)] for i in range(120))
            messages = (Message("user", opening),)
            for turn in range(TURNS):
                began = time.monotonic()
                try:
                    [said] = await self.model.generate(Request(messages, Sampling(TOKENS, seed=count)))
                except ModelCallError:
                    self.failed += 1
                    break
                self.answered += 1
                self.latencies.append(time.monotonic() - began)
                messages = (*messages, Message("assistant", said.text), Message("user", self.words[turn]))
            count += 1

    async def rate(self, seconds: float) -> tuple[float, float]:
        """Calls answered a second, and the slowest of them."""
        before, began = self.answered, time.monotonic()
        self.latencies.clear()
        await asyncio.sleep(seconds)
        return (self.answered - before) / (time.monotonic() - began), max(self.latencies, default=seconds)


async def measure(file: Path, words: list[str], seconds: float, conversations: int) -> None:
    """Print the rates of the rounds and their ratio."""
    state = read_state(folder_of(file)) or {}
    stopped = state["servers"]["user-2"]["pid"]
    spec = with_addresses(str(file), {"user": ModelSpec.parse({"model": "serve:user", "concurrency": 32})})["user"]
    async with connect(spec) as model:
        load = Load(model, words)
        talks = [asyncio.create_task(load.talk(number)) for number in range(conversations)]
        await asyncio.sleep(seconds)  # the rates of the first calls define what counts as slow
        whole: list[float] = []
        short: list[float] = []
        for _ in range(3):
            rate, slowest = await load.rate(seconds)
            whole.append(rate)
            print(f"three up      {rate:7.1f} calls/s, slowest {slowest:5.2f} s", flush=True)
            os.kill(stopped, signal.SIGSTOP)
            try:
                rate, slowest = await load.rate(seconds)
            finally:
                os.kill(stopped, signal.SIGCONT)
            short.append(rate)
            print(f"one stopped   {rate:7.1f} calls/s, slowest {slowest:5.2f} s", flush=True)
        for talk in talks:
            talk.cancel()
        await asyncio.gather(*talks, return_exceptions=True)
        told = {name: value for name, value in model.stats().items() if "opened" in name}
        print(f"one stopped / three up: {statistics.median(short) / statistics.median(whole):.2f}")
        print(f"answered {load.answered}, failed {load.failed}; {told}")
    for name, server in state["servers"].items():
        hits, lookups = cache_of(server["url"])
        print(f"{name}: {hits / max(lookups, 1):.0%} of {lookups:.0f} prompt tokens were in its prefix cache")


def cache_of(url: str) -> tuple[float, float]:
    """Prefix hits and lookups, as a server counts them."""
    text = urllib.request.urlopen(url.removesuffix("/v1") + "/metrics").read().decode()
    found = [re.search(rf"^upshot_prefix_{name}_total (\S+)$", text, re.M) for name in ("hits", "lookups")]
    return float(found[0][1]), float(found[1][1])  # type: ignore[index]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--conversations", type=int, default=24)
    args = parser.parse_args()
    words: Any = SlotsTask(rows_per_split=16).vocabulary()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = tiny_tokenizer(words)
        tiny_model(TinyConfig(hidden=64, layers=2, heads=4, mlp=128, context=1024), tokenizer, 0).save_pretrained(
            f"{folder}/tiny"
        )
        tokenizer.save_pretrained(f"{folder}/tiny")
        file = Path(folder) / "servers.yaml"
        file.write_text("servers: {user: {model: tiny, devices: cpu, replicas: 3}}")
        fleet = subprocess.Popen([sys.executable, "-m", "upshot.cli", "serve", str(file)], stdout=subprocess.DEVNULL)
        try:
            while not ready(read_state(folder_of(file))):
                if fleet.poll() is not None:
                    raise SystemExit("the servers did not start")
                time.sleep(0.2)
            asyncio.run(measure(file, list(words), args.seconds, args.conversations))
        finally:
            fleet.terminate()
            fleet.wait()


if __name__ == "__main__":
    main()
