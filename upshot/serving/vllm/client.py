"""The routes of a vLLM server that change what it holds: gate, weights, adapters, sleep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from upshot.core.http_client import AttemptError, HttpClient

SECONDS = 600.0
"""Most seconds of one change: gigabytes of weights take some."""
LOOK_S = 10.0
"""Most seconds of a question."""


class ServerDown(Exception):
    """The server did not do what it was asked: it is gone, or is just starting again."""


class VllmClient:
    """A server's changes, one call each; all raise `ServerDown`."""

    def __init__(self, url: str, key: str) -> None:
        self._http = HttpClient(url.removesuffix("/v1"), headers={"Authorization": f"Bearer {key}"})

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def version(self) -> str | None:
        """Which weights its gate is open for."""
        return str(found) if (found := (await self._look("/upshot/gate"))["version"]) else None

    async def close_gate(self) -> None:
        """Let no request in, and wait until none is under way."""
        await self._change("/upshot/gate")

    async def open_gate(self, version: str) -> None:
        """Let requests for this version in."""
        await self._change(f"/upshot/gate?version={version}")

    async def ask_workers(self, method: str, *arguments: str) -> list[dict[str, Any]]:
        """What every worker answers."""
        body = {"method": method, "args": list(arguments)}
        return list((await self._change("/collective_rpc", body, told=True))["results"])

    async def reset_prefix_cache(self) -> None:
        """Empty the cache of keys and values."""
        await self._change("/reset_prefix_cache")

    async def load_adapter(self, name: str, folder: Path) -> None:
        """Load an adapter under a name."""
        await self._change("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})

    async def adapters(self) -> list[str]:
        """The adapters that are loaded."""
        return [str(entry["id"]) for entry in (await self._look("/v1/models"))["data"] if entry.get("parent")]

    async def unload_adapter(self, name: str) -> None:
        """Forget an adapter."""
        await self._change("/v1/unload_lora_adapter", {"lora_name": name})

    async def sleep(self, level: int) -> None:
        """Give the GPU's memory back: 1 keeps the weights on the host, 2 forgets them."""
        await self._change(f"/sleep?level={level}")

    async def is_asleep(self) -> bool:
        """Whether it does."""
        return bool((await self._look("/is_sleeping"))["is_sleeping"])

    async def wake(self, part: str) -> None:
        """Take memory again for the 'weights', or for the 'kv_cache'."""
        await self._change(f"/wake_up?tags={part}")

    async def _look(self, path: str) -> dict[str, Any]:
        return await self._send("GET", path, None, LOOK_S, told=True)

    async def _change(self, path: str, body: Any = None, told: bool = False) -> dict[str, Any]:
        return await self._send("POST", path, body, SECONDS, told)

    async def _send(self, method: str, path: str, body: Any, seconds: float, told: bool) -> dict[str, Any]:
        """What the server says, where it is `told` in JSON; a failed change is not tried again behind others' backs."""
        try:
            answer = await self._http.send(method, path, body, timeout_s=seconds)
            if answer.status != 200:
                raise answer.failure()
            return answer.json_object() if told else {}
        except AttemptError as error:
            raise ServerDown(f"{path}: {error.reason}: {error.detail}") from error
