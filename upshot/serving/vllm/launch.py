"""The server of a run's policy: its address, its share of the GPU, and its routes that change its state.

These are gate, weights, adapters and sleep. `run/policy_server.py` starts the server.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from upshot.config.model_spec import ModelSpec
from upshot.config.recipe import Recipe
from upshot.core.errors import UserError
from upshot.core.http_client import AttemptError, HttpClient
from upshot.models.local import pick_device
from upshot.serving.servers.state import folder_of, is_up, read_state

NAME = "policy"
KEY = "UPSHOT_POLICY_KEY"
"""Environment variable with the server's key, which is new in every run."""
START_S = 900.0
BESIDE, ALONE = 0.4, 0.9
"""Share of a GPU's memory, with the learner on the same GPU and without it."""
CHANGE_S = 600.0
"""Time limit of one change, in seconds: loading gigabytes of weights takes time."""
LOOK_S = 10.0
"""Time limit of a query, in seconds."""


@dataclass(frozen=True)
class Address:
    """The address of the policy's server."""

    spec: ModelSpec
    """How to call the model: URL, name and limits."""
    key: str
    log: Path
    same_gpu: bool = False
    """Whether it shares a GPU with the learner."""
    level: int = 2
    """vLLM's sleep level on a shared GPU."""
    workers: int = 1
    start_s: float = START_S
    is_up: Callable[[], bool] = lambda: True
    """Whether somebody would start it again."""

    @property
    def url(self) -> str:
        """Its address, with /v1."""
        return str(self.spec.url)


def sleep_level(recipe: Recipe) -> int:
    """1 keeps the weights on the host, because the base below adapters is not sent again. 2 discards them."""
    return 2 if recipe.model.lora is None else 1


def file_of(run: Path) -> Path:
    """The serve file of a run's policy."""
    return run / "vllm" / f"{NAME}.yaml"


def find(recipe: Recipe, run: Path) -> Address:
    """The address of the server that `serve_policy` has started."""
    folder = folder_of(file_of(run))
    state = read_state(folder)
    if state is None:
        raise UserError(f"the policy's vLLM server is not running; its log: {folder / f'{NAME}.log'}")
    server = state["servers"][NAME]
    spec = ModelSpec(
        url=server["url"], model=NAME, token_ids=True, api_key_env=KEY, concurrency=1024, retries=0, timeout_s=3600
    )
    gpus = devices_of(recipe)
    same_gpu, level, workers = own_gpu(recipe) in gpus, sleep_level(recipe), max(len(gpus), 1)
    key, log = os.environ[KEY], Path(server["log"])
    return Address(spec, key, log, same_gpu, level, workers, is_up=lambda: is_up(folder))


def own_gpu(recipe: Recipe) -> int | None:
    """The number of the learner's GPU; None: the CPU."""
    kind, _, number = pick_device(recipe.model.device).partition(":")
    return int(number or 0) if kind == "cuda" else None


def devices_of(recipe: Recipe) -> list[int]:
    """The server's GPUs; none: the CPU."""
    wished = recipe.model.engine.devices
    if wished == "policy":
        gpu = own_gpu(recipe)
        return [] if gpu is None else [gpu]
    return [] if wished == "cpu" else [int(number) for number in wished]


def share_of(recipe: Recipe) -> float:
    """The share of its GPUs' memory that the server takes while it is awake."""
    return recipe.model.engine.memory or (BESIDE if own_gpu(recipe) in devices_of(recipe) else ALONE)


class ServerDown(Exception):
    """The server did not carry out a request: it has ended, or is restarting."""


class VllmClient:
    """The calls that change a server; all of them may raise `ServerDown`."""

    def __init__(self, url: str, key: str) -> None:
        self._http = HttpClient(url.removesuffix("/v1"), headers={"Authorization": f"Bearer {key}"})

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def turn_gate(self, version: str | None) -> None:
        """Let requests for this version in; None: let none in, and wait until none is in progress."""
        await self.change("/upshot/gate" if version is None else f"/upshot/gate?version={version}")

    async def ask_workers(self, method: str, *arguments: str) -> list[dict[str, Any]]:
        """Call a method on every worker; returns their answers."""
        body = {"method": method, "args": list(arguments)}
        return list((await self.change("/collective_rpc", body, answers=True))["results"])

    async def sleep(self, level: int) -> None:
        """Release the GPU's memory: 1 keeps the weights on the host, 2 discards them."""
        await self.change(f"/sleep?level={level}")

    async def look(self, path: str) -> dict[str, Any]:
        """The state of the server."""
        return await self._send("GET", path, None, LOOK_S, answers=True)

    async def change(self, path: str, body: Any = None, answers: bool = False) -> dict[str, Any]:
        """Send a change; returns the response if the route `answers` in JSON."""
        return await self._send("POST", path, body, CHANGE_S, answers)

    async def _send(self, method: str, path: str, body: Any, seconds: float, answers: bool) -> dict[str, Any]:
        """Send a request once; a failed change is not retried silently."""
        try:
            answer = await self._http.send(method, path, body, timeout_s=seconds)
            if answer.status != 200:
                raise answer.failure()
            return answer.json_object() if answers else {}
        except AttemptError as error:
            raise ServerDown(f"{path}: {error.reason}: {error.detail}") from error
