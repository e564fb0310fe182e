"""The routes of a vLLM server that change what it holds: gate, weights, adapters, sleep."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from upshot.core.http_client import error_detail

if TYPE_CHECKING:
    import aiohttp

SECONDS = 600.0
"""Most seconds of one change: gigabytes of weights take some."""


class ServerDown(Exception):
    """The server did not do what it was asked: it is gone, or is just starting again."""


class VllmClient:
    """A server's changes, one call each; all raise `ServerDown`."""

    def __init__(self, url: str, key: str) -> None:
        self.root = url.removesuffix("/v1")
        self.key = key
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Close the connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def version(self) -> str | None:
        """Which weights its gate is open for."""
        return str(found) if (found := (await self._call("GET", "/upshot/gate", 10.0))["version"]) else None

    async def close_gate(self) -> None:
        """Let no request in, and wait until none is under way."""
        await self._call("POST", "/upshot/gate")

    async def open_gate(self, version: str) -> None:
        """Let requests for this version in."""
        await self._call("POST", f"/upshot/gate?version={version}")

    async def ask_workers(self, method: str, *arguments: str) -> list[dict[str, Any]]:
        """What every worker answers."""
        found = await self._call("POST", "/collective_rpc", body={"method": method, "args": list(arguments)})
        return list(found["results"])

    async def reset_prefix_cache(self) -> None:
        """Empty the cache of keys and values."""
        await self._call("POST", "/reset_prefix_cache")

    async def load_adapter(self, name: str, folder: Path) -> None:
        """Load an adapter under a name."""
        await self._call("POST", "/v1/load_lora_adapter", body={"lora_name": name, "lora_path": str(folder)})

    async def adapters(self) -> list[str]:
        """The adapters that are loaded."""
        listed = (await self._call("GET", "/v1/models", 10.0))["data"]
        return [str(entry["id"]) for entry in listed if entry.get("parent")]

    async def unload_adapter(self, name: str) -> None:
        """Forget an adapter."""
        await self._call("POST", "/v1/unload_lora_adapter", body={"lora_name": name})

    async def sleep(self, level: int) -> None:
        """Give the GPU's memory back: 1 keeps the weights on the host, 2 forgets them."""
        await self._call("POST", f"/sleep?level={level}")

    async def is_asleep(self) -> bool:
        """Whether it does."""
        return bool((await self._call("GET", "/is_sleeping", 10.0))["is_sleeping"])

    async def wake(self, part: str) -> None:
        """Take memory again for the 'weights', or for the 'kv_cache'."""
        await self._call("POST", f"/wake_up?tags={part}")

    async def _call(self, method: str, path: str, seconds: float = SECONDS, body: Any = None) -> Any:
        import aiohttp

        if self._session is None:
            headers = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"}
            self._session = aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=None))
        data = json.dumps(body).encode() if body is not None else None
        try:
            async with asyncio.timeout(seconds):
                async with self._session.request(method, f"{self.root}{path}", data=data) as response:
                    status, raw = response.status, await response.read()
        except (aiohttp.ClientError, OSError) as error:  # a TimeoutError among them
            raise ServerDown(f"{path}: {error or type(error).__name__}") from error
        if status != 200:
            raise ServerDown(f"{path}: HTTP {status}: {error_detail(raw)}")
        try:
            return json.loads(raw or b"null")
        except ValueError:
            return raw.decode("utf-8", "replace")
