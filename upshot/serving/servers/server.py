"""One server: its process, its health, its end."""

from __future__ import annotations

import asyncio
import signal
import time
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from pathlib import Path

from upshot.core.errors import UserError
from upshot.core.http_client import AttemptError, HttpClient
from upshot.core.process import Reaper, end_group, parent_death_hook
from upshot.serving.servers.plan import Command

LOOK_S = 0.25
"""Seconds between checks of a server that is starting."""
CHECK_S = 5.0
"""Seconds between checks of a running server."""
ANSWER_S = 10.0
"""Time limit of one request to /health, in seconds."""
GRACE_S = 15.0
"""Seconds from SIGTERM to SIGKILL."""


class ServerEnded(Exception):
    """The server's process has ended, or had to be ended; the text says why."""


@dataclass
class ModelServer:
    """A server that can be started again and again on its port."""

    name: str
    command: Command
    host: str
    port: int
    log: Path
    reaper: Reaper
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """A lock held while it starts; servers that must not start at the same time share it."""
    status: str = "waiting"
    """waiting, starting, running, restarting or stopped."""
    restarts: int = 0
    seconds: float = 0.0
    """How long the last start took."""
    process: asyncio.subprocess.Process | None = None

    @property
    def address(self) -> str:
        """The URL under which this machine reaches it."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    @property
    def pid(self) -> int | None:
        """The process, while there is one."""
        return self.process.pid if self.process is not None else None

    async def start(self, within_s: float) -> None:
        """Start the process and wait until it is healthy; `ServerEnded` if it never is."""
        began = time.monotonic()
        with self.log.open("ab") as log:
            try:
                self.process = await asyncio.create_subprocess_exec(
                    *self.command.words,
                    env=self.command.environment,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    preexec_fn=parent_death_hook(),
                )
            except OSError as error:
                raise UserError(f"server '{self.name}': {self.command.words[0]}: {error.strerror}") from error
        self.reaper.watch(self.process.pid)
        while not await self.healthy():
            if await self._ends_within(LOOK_S):
                raise ServerEnded(await self._end_rest())
            if time.monotonic() - began > within_s:
                await self.stop(0.0)
                raise ServerEnded(f"was not ready after {within_s:g} s")
        self.seconds = time.monotonic() - began

    async def wait_for_end(self, hung_s: float) -> str:
        """Wait until the process ends, or has not answered for `hung_s` seconds and is ended; returns the reason."""
        answered = time.monotonic()
        while not await self._ends_within(min(CHECK_S, hung_s)):
            if await self.healthy():
                answered = time.monotonic()
            elif time.monotonic() - answered > hung_s and not await self._ends_within(0.0):
                await self.stop(0.0)
                return f"did not answer for {hung_s:g} s"
        return await self._end_rest()

    async def stop(self, grace_s: float = GRACE_S) -> None:
        """Send SIGTERM, and SIGKILL to what is left after the grace period."""
        if self.process is None:
            return
        if grace_s > 0 and self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
            await self._ends_within(grace_s)
        await self._end_rest()

    async def healthy(self) -> bool:
        """Whether it answers /health with 200."""
        with suppress(AttemptError):
            async with aclosing(HttpClient(self.address, timeout_s=ANSWER_S)) as client:
                return (await client.send("GET", "/health")).status == 200
        return False

    async def _ends_within(self, within_s: float) -> bool:
        """Whether the process ends within this many seconds."""
        assert self.process is not None
        with suppress(TimeoutError):
            await asyncio.wait_for(self.process.wait(), within_s)
            return True
        return False

    async def _end_rest(self) -> str:
        """End the rest of the process and its children; returns how it ended."""
        assert self.process is not None
        end_group(self.process.pid)
        code = await self.process.wait()
        self.reaper.forget(self.process.pid)
        self.process = None
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
