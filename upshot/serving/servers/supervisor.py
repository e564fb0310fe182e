"""The supervisor: starts all servers of a file, restarts those that crash, and stops all together.

There is one per serve file, in the process of `upshot serve FILE.yaml`, which a user or a run's lease (`state.py`)
starts. It is a separate process and not a thread of the run, because runs share the servers of a file: servers that one
run started must outlive it while another still uses them.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from upshot.core.errors import UserError
from upshot.core.files import write_atomic, write_json
from upshot.core.process import Reaper
from upshot.serving.servers.file import ServersConfig, digest
from upshot.serving.servers.plan import check_program, compose, divide_memory, pick_ports, place_servers, visible_gpus
from upshot.serving.servers.server import GRACE_S, ModelServer, ServerEnded
from upshot.serving.servers.state import ANYWHERE, STATE, USERS_LOCK, lock, tail

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 60.0
"""Seconds before a crashed server is restarted: the first pause, doubled with each crash up to the longest."""
STEADY_S = 60.0
"""After this many seconds without a crash, the pause starts again with the first."""
USERS_S = 0.3
"""Seconds between checks whether anybody still uses the servers."""


class Supervisor:
    """Runs the servers of a file in this process. The caller holds their lock."""

    def __init__(
        self, file: Path, config: ServersConfig, folder: Path, say: Callable[[str], None], map_file: Path | None = None
    ) -> None:
        self.file, self.config, self.folder, self.say, self.map_file = file, config, folder, say, map_file
        check_program(config)
        gpus = visible_gpus()
        self.places = place_servers(config.servers, gpus)
        self.shares = divide_memory(config.servers, self.places)
        ports = pick_ports(config)
        self.digest = digest(file)
        self.reaper = Reaper()
        turns: dict[int, asyncio.Lock] = {}
        self.servers: list[ModelServer] = []
        for name, settings in config.servers.items():
            gpus_of_server = [gpus[number] for number in self.places[name]]
            command = compose(config, name, ports[name], gpus_of_server, self.shares.get(name), os.environ)
            server = ModelServer(name, command, config.host, ports[name], folder / f"{name}.log", self.reaper)
            if settings.engine == "vllm" and gpus_of_server:
                # vLLM measures free memory while it starts: two that start on one GPU would count each other's memory.
                server.turn = turns.setdefault(self.places[name][0], server.turn)
            self.servers.append(server)
        self._hurry = asyncio.Event()
        self._kept = ExitStack()

    async def run(self, on_ready: Callable[[], None], while_used: bool = False) -> None:
        """Run until a signal, or with `while_used` until nobody uses it; `UserError` if a server never gets ready."""
        try:
            for server in self.servers:
                server.log.write_bytes(b"")
            self.publish()
        except OSError as error:
            self.reaper.close()
            raise UserError(f"cannot write logs and state to '{self.folder}': {error.strerror}") from None
        stopped = self._catch_signals()  # before anything starts that a signal must end
        keepers = [asyncio.create_task(self._keep(server)) for server in self.servers]
        announcement = asyncio.create_task(self._wait_until_ready(on_ready))
        ends: list[asyncio.Task[Any]] = [asyncio.create_task(stopped.wait())]
        if while_used:
            ends.append(asyncio.create_task(self._wait_until_unused()))
        try:
            await asyncio.wait([*keepers, *ends], return_when=asyncio.FIRST_COMPLETED)
            for task in keepers:
                if task.done():
                    task.result()
        finally:
            for task in (*keepers, *ends, announcement):
                task.cancel()
            await asyncio.gather(*keepers, *ends, announcement, return_exceptions=True)
            await self._stop()

    def publish(self) -> None:
        """Write the classmate map, if wanted, and then the state: whoever reads that all run also finds the map."""
        if self.map_file is not None:
            write_map(self.map_file, self.config, {s.name: (s.port, s.status) for s in self.servers})
        write_json(self.folder / STATE, self.state())

    def state(self) -> dict[str, Any]:
        """The state of the servers."""
        return {
            "pid": os.getpid(),
            "machine": socket.gethostname(),
            "host": self.config.host,
            "file": str(self.file),
            "digest": self.digest,
            "api_key_env": self.config.api_key_env if self.config.key else None,
            "servers": {
                server.name: {
                    "asked_as": self.config.asked_as(server.name),
                    "model": self.config.servers[server.name].model,
                    "engine": self.config.servers[server.name].engine,
                    "devices": self.places[server.name],
                    "memory": self.shares.get(server.name),
                    "url": f"{server.address}/v1",
                    "status": server.status,
                    "pid": server.pid,
                    "restarts": server.restarts,
                    "seconds": round(server.seconds, 1),
                    "log": str(server.log),
                }
                for server in self.servers
            },
        }

    def _mark(self, server: ModelServer, status: str) -> None:
        """Write down a server's new state. A full disk must not end running servers."""
        server.status = status
        try:
            self.publish()
        except OSError as error:
            self.say(f"{server.name} is {status}, but that cannot be written: {error.strerror} ({self.folder})")

    async def _keep(self, server: ModelServer) -> None:
        """Start a server, and restart it whenever it ends."""
        crashes, was_ready = 0, False
        while True:
            began = time.monotonic()
            try:
                async with server.turn:
                    self._mark(server, "starting")
                    await server.start(self.config.start_s)
                self._mark(server, "running")
                if was_ready:
                    self.say(f"{server.name} is back after {server.seconds:.1f} s")
                was_ready = True
                reason = await server.wait_for_end(self.config.hung_s)
            except ServerEnded as error:
                reason = str(error)
                if not was_ready:
                    raise UserError(f"server '{server.name}' {reason}; {server.log}: {tail(server.log)}") from None
            crashes = 1 if time.monotonic() - began > STEADY_S else crashes + 1
            pause = min(FIRST_PAUSE_S * 2 ** (crashes - 1), LONGEST_PAUSE_S)
            server.restarts += 1
            self._mark(server, "restarting")
            self.say(f"{server.name} {reason}; starting it again in {pause:g} s (log: {server.log})")
            await asyncio.sleep(pause)

    async def _wait_until_ready(self, on_ready: Callable[[], None]) -> None:
        while any(server.status != "running" for server in self.servers):
            await asyncio.sleep(0.05)
        on_ready()

    def _catch_signals(self) -> asyncio.Event:
        """An event set by SIGINT, SIGTERM or (unless ignored, as under nohup) SIGHUP; a second signal ends at once."""
        loop, first = asyncio.get_running_loop(), asyncio.Event()

        def on_signal() -> None:
            (self._hurry if first.is_set() else first).set()

        wanted = [signal.SIGINT, signal.SIGTERM]
        wanted += [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN else []
        for number in wanted:
            loop.add_signal_handler(number, on_signal)
        return first

    async def _wait_until_unused(self) -> None:
        """Wait until no run holds the users' lock, and keep it: the next run waits until these servers are gone."""
        while True:
            if self._kept.enter_context(lock(self.folder / USERS_LOCK, fcntl.LOCK_EX | fcntl.LOCK_NB)):
                return
            self._kept.close()
            await asyncio.sleep(USERS_S)

    async def _stop(self) -> None:
        """Stop all servers at once, and write that none runs."""
        hurried = asyncio.create_task(self._hurry.wait())

        async def stop(server: ModelServer) -> None:
            patient = asyncio.create_task(server.stop(GRACE_S))
            await asyncio.wait([patient, hurried], return_when=asyncio.FIRST_COMPLETED)
            if not patient.done():
                patient.cancel()
                await asyncio.gather(patient, return_exceptions=True)
                await server.stop(0.0)

        await asyncio.gather(*map(stop, self.servers))
        hurried.cancel()
        for server in self.servers:
            self._mark(server, "stopped")
        (self.folder / STATE).unlink(missing_ok=True)
        self.reaper.close()


def check_map(config: ServersConfig) -> None:
    """Refuse a map in which two servers would have the same key."""
    seen: dict[str, str] = {}
    for process, server in config.servers.items():
        name = config.asked_as(process)
        if seen.setdefault(server.model, name) != name:  # replicas are one entry
            raise UserError(
                f"--map: '{seen[server.model]}' and '{name}' both serve {server.model}, and a map is keyed by model; "
                "name them in the recipe as serve:NAME instead, or make them one server with `replicas`"
            )


def write_map(path: Path, config: ServersConfig, servers: Mapping[str, tuple[int, str]]) -> None:
    """Write the map of servers by name → (port, status); replicas are one entry, up when all of them are."""
    anywhere = config.host in ANYWHERE
    entries: dict[str, dict[str, Any]] = {}
    for name, (port, status) in servers.items():
        if (entry := entries.get(config.servers[name].model)) is not None:
            entry["ports"] = [*entry.get("ports", [entry["port"]]), port]
            entry["status"] = status if entry["status"] == "running" else entry["status"]
            continue
        entries[config.servers[name].model] = {
            "outward_host": socket.gethostname() if anywhere else config.host,
            "local_host": config.host,
            "port": port,
            "served_model_name": config.asked_as(name),
            "model_index": len(entries),
            "status": status,
            **({"api_key_env": config.api_key_env} if config.key else {}),
        }
    write_atomic(path, (json.dumps(entries, indent=2) + "\n").encode())
