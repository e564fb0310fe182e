"""The embedded engine behind `upshot serve FILE.yaml`, with real processes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.patience import wait_until
from tests.serving.servers.started import Started, alive
from tests.tiny import tiny_parts
from upshot.config.model_spec import ModelSpec
from upshot.config.sampling import Sampling
from upshot.core.conversation import Message
from upshot.models.base import Request
from upshot.models.connect import connect
from upshot.serving.servers.state import is_up, read_state, with_addresses


def answer(file: Path, name: str) -> str:
    """The answer of a server in the file."""
    spec = with_addresses(str(file), {"user": ModelSpec.parse(f"serve:{name}")})["user"]

    async def ask() -> str:
        async with connect(spec) as model:
            request = Request((Message("user", "hello"),), Sampling(4, 0.0))
            return (await model.generate(request))[0].text

    return asyncio.run(ask())


@pytest.mark.slow
def test_servers_answer_restart_after_a_kill_and_end_with_their_parent(
    serve_file: Callable[[str], Path], tmp_path: Path
) -> None:
    module, tokenizer, _, _ = tiny_parts()
    module.save_pretrained(tmp_path / "tiny")
    tokenizer.save_pretrained(tmp_path / "tiny")
    file = serve_file("servers: {user: {model: tiny, devices: cpu}, peer: {model: tiny, devices: cpu}}")
    started = Started(file)
    before = started.ready()["servers"]
    said = answer(file, "user")
    assert said == answer(file, "peer")
    os.kill(before["user"]["pid"], signal.SIGKILL)
    wait_until(lambda: (state := read_state(started.folder)) and state["servers"]["user"]["restarts"] == 1)
    after = started.ready()["servers"]
    assert after["user"]["url"] == before["user"]["url"] and after["peer"]["pid"] == before["peer"]["pid"]
    assert answer(file, "user") == said
    started.end(signal.SIGKILL)
    pids = [server["pid"] for server in after.values()]
    wait_until(lambda: not any(map(alive, pids)) and not is_up(started.folder), 10)
