"""The ledger as an actor of Ray, without verl: workers that share an endpoint, one that dies, a ledger that dies.

As a program: `python -m tests.verl.real.ledgers FOLDER` plays it and prints a line.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import ray

from upshot.config.load import load_recipe
from upshot.config.model_spec import ModelSpec
from upshot.config.sampling import Sampling
from upshot.models.base import Completion, Request
from upshot.models.client.budget import Budget
from upshot.models.client.limits import EndpointLimits
from upshot.models.endpoint import EndpointModel
from upshot.models.openai_format import ApiAnswer
from upshot.verl.adapters.ledger import make_teller, open_ledger
from upshot.verl.budget.quota import WorkerQuota

BOUND = 4


@ray.remote(num_cpus=0)
class Endpoint:
    """Counts who is in flight."""

    def __init__(self) -> None:
        self.now = self.most = self.calls = 0

    async def enter(self) -> None:
        """A call comes."""
        self.now, self.calls = self.now + 1, self.calls + 1
        self.most = max(self.most, self.now)

    async def leave(self, count: int = 1) -> None:
        """Calls go."""
        self.now -= count

    async def seen(self) -> tuple[int, int, int]:
        """Calls, most in flight, in flight now."""
        return self.calls, self.most, self.now


class Caller(EndpointModel):
    """A model that calls the endpoint above."""

    endpoint: Any
    seconds = 0.01

    async def _attempt(self, request: Request, n: int, seed: int | None) -> ApiAnswer:
        await self.endpoint.enter.remote()
        await asyncio.sleep(self.seconds)
        await self.endpoint.leave.remote()
        return ApiAnswer([Completion("yes", "stop")] * n, prompt_tokens=1, completion_tokens=1, cost=0.0)


@ray.remote(num_cpus=0)
class Worker:
    """A process with a share."""

    def __init__(self, name: str, endpoint: Any, max_calls: int) -> None:
        spec = ModelSpec(url="http://127.0.0.1:1/v1", model="m", concurrency=BOUND)
        self.model = Caller(spec, budget=Budget(max_calls), limits=EndpointLimits.of(spec))
        self.model.endpoint = endpoint
        self.share = WorkerQuota(name, make_teller(name), self.model.budget, [self.model])

    async def ask(self, times: int, seconds: float = 0.01) -> list[str]:
        """What comes of so many calls."""
        self.model.seconds = seconds
        self.share.start(self.share.aclose)
        asked = (self.model.generate(Request("hello", Sampling(4))) for _ in range(times))
        found = await asyncio.gather(*asked, return_exceptions=True)
        return [str(each) if isinstance(each, Exception) else "answered" for each in found]


def play(folder: Path) -> dict[str, Any]:
    """All of it."""
    ray.init(num_cpus=4, include_dashboard=False, logging_level="ERROR")
    recipe = load_recipe("quickstart", ["credit.by=reply", "budget.max_calls=200"]).recipe
    ledger = open_ledger(recipe, folder)
    stopped = ledger.stopped.remote()
    endpoint = Endpoint.remote()  # type: ignore[attr-defined]
    first, second = (Worker.remote(name, endpoint, 200) for name in ("first", "second"))  # type: ignore[attr-defined]
    answers = ray.get([first.ask.remote(40), second.ask.remote(40)])
    out: dict[str, Any] = {"answers": [set(each) == {"answered"} for each in answers]}
    out["calls"], out["most"], _ = ray.get(endpoint.seen.remote())
    out["view"] = ray.get(ledger.view.remote())
    first.ask.remote(BOUND, 1000.0)  # holds every slot, and dies with them
    while ray.get(endpoint.seen.remote())[2] < BOUND:
        pass
    waiting = second.ask.remote(3)
    assert not ray.wait([waiting], timeout=1.5)[0]
    ray.kill(first)
    ray.get(endpoint.leave.remote(BOUND))
    out["after a death"] = ray.get(waiting, timeout=60)
    out["stopped"] = ray.get(stopped, timeout=60)
    out["spent"] = json.loads((folder / "spent.json").read_text())
    out["most again"] = ray.get(endpoint.seen.remote())[1]
    ray.kill(ledger)
    out["without a ledger"] = ray.get(second.ask.remote(20), timeout=60)[-1]
    ray.shutdown()
    return out


if __name__ == "__main__":
    print("FOUND " + json.dumps(play(Path(sys.argv[1]))))
