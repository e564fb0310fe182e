"""A judge behind HTTP that can be stopped and started again at the same address.

As a program: `python -m tests.verl.real.judge PORT FILE` serves until killed; FILE contains what it has seen.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.models.misbehaving_server import MODEL, MisbehavingServer

RUBRIC = "Rate this conversation: {{ conversation }}. Answer with a JSON object with the keys thought and score."


class Judge:
    """The judge's process, and the overrides of a recipe that uses it."""

    def __init__(self, folder: Path, **options: Any) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.seen = folder / "judge.json"
        rubric = folder / "rubric.j2"
        rubric.write_text(RUBRIC)
        spec = {"url": f"http://127.0.0.1:{self.port}/v1", "model": MODEL, **options}
        metrics = [{"name": "verifier"}, {"name": "judged", "rubric": str(rubric), "weight": 0.1}]
        self.words = (f"models={json.dumps({'judge': spec})}", f"reward.metrics={json.dumps(metrics)}")
        self.process: subprocess.Popen[bytes] | None = None

    def up(self) -> None:
        """Start serving."""
        words = [sys.executable, "-m", "tests.verl.real.judge", str(self.port), str(self.seen)]
        self.process = subprocess.Popen(words, env={**os.environ, "PYTHONPATH": os.getcwd()})
        end = time.monotonic() + 30
        while time.monotonic() < end:
            try:
                return socket.create_connection(("127.0.0.1", self.port), 1).close()
            except OSError:
                time.sleep(0.1)
        raise AssertionError("the judge does not come up")

    def down(self) -> None:
        """Stop, with all its connections."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def tally(self) -> dict[str, int]:
        """The number of calls, and the most in flight at once."""
        found: dict[str, int] = json.loads(self.seen.read_text())
        return found

    def __enter__(self) -> Judge:
        self.up()
        return self

    def __exit__(self, *exc: object) -> None:
        self.down()


async def serve(port: int, seen: Path) -> None:
    """Answer, and count."""
    calls = 0

    async def reply(_: dict[str, Any]) -> str:
        nonlocal calls
        calls += 1
        seen.write_text(json.dumps({"calls": calls, "most": server.most_in_flight}))
        await asyncio.sleep(0.05)
        return json.dumps({"thought": "fine", "score": 0.5})

    async with MisbehavingServer(reply, keep_bodies=False, port=port) as server:
        await asyncio.sleep(1e6)


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), Path(sys.argv[2])))
