"""200 whole conversations over real HTTP with a server that drops, rate-limits, garbles and stalls."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.models.misbehaving_server import MODEL, MisbehavingServer
from tests.patience import patience
from upshot.cli.eval import add_arguments
from upshot.config.sampling import Sampling
from upshot.core.conversation import Message
from upshot.models.base import Request
from upshot.offline.tabulate import run

DATA = Path(__file__).parent / "data"
FAULTS = {"drop": 0.05, "limit_rate": 0.05, "malformed": 0.03, "stall": 0.01, "latency": 0.002, "keep_bodies": False}


@contextmanager
def served(reply: Any) -> Iterator[MisbehavingServer]:
    """The server on its own event loop, like a real one."""
    loop = asyncio.new_event_loop()
    server = MisbehavingServer(reply, **FAULTS)
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    asyncio.run_coroutine_threadsafe(server.__aenter__(), loop).result()
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(server.__aexit__(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


def test_200_conversations_complete_with_every_failure_retried_or_missing_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(DATA))
    import collab_actors

    rng = random.Random(0)

    async def reply(body: dict[str, Any]) -> str:
        request = Request([Message.from_dict(m) for m in body["messages"]], Sampling(seed=body.get("seed")))
        start = request.prompt[0].content
        if start.startswith("You play a person"):
            actor = collab_actors.user
        elif start.startswith(("You check", "You rate")):
            actor = collab_actors.judge
        else:
            return await collab_actors.policy(request)
        return '{"response": "half of' if rng.random() < 0.03 else await actor(request)

    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with served(reply) as server:
        spec = f"{{url: {server.url}, model: {MODEL}, timeout_s: {patience(1.5)}, backoff_s: 0.05, concurrency: 128}}"
        words = ["--task", str(collab_actors.goals(tmp_path, 100)), "--split", "all", "--max-messages", "6", "--json"]
        words += ["--models", f"{{base: {spec}, proactive: {spec}}}", "--user", spec, "--judge", spec]
        assert run(parser.parse_args([*words, "--out", str(tmp_path / "out"), "--concurrency", "100"])) == 0
        outcomes = dict(server.outcomes)
    lines = [json.loads(line) for line in (tmp_path / "out" / "rollouts.jsonl").read_text().splitlines()]
    assert len(lines) == len({line["key"] for line in lines}) == 200
    for line in lines:
        assert len(set(collab_actors.MARK.findall(json.dumps(line["messages"])))) == 1, "a goal was mixed up"
        for name, score in line["scores"].items():
            assert "value" in score or score["missing"], f"{name} is neither a number nor missing with a reason"
        accuracy = line["scores"]["accuracy"]
        if accuracy.get("value") == 0:  # a zero always comes from the judge, never from a failure
            assert not any("it is." in m["content"] for m in line["messages"] if m["role"] == "assistant")
    missing = sum("missing" in line["scores"]["accuracy"] for line in lines)
    assert missing <= 10 and min(outcomes[k] for k in ("dropped", "limited", "malformed", "stalled")) > 0
