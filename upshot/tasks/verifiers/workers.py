"""Worker processes that verify claims and can be killed: time and memory limits that really hold.

One item at a time per worker. An item that hangs, crashes or eats memory costs itself: its score is missing with the
reason, its worker is replaced (a fork, milliseconds), its neighbours never notice.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from upshot.core.errors import UserError
from upshot.core.score import Reason, Score
from upshot.core.time_limit import pause_clock
from upshot.tasks.verifiers.base import Claim
from upshot.tasks.verifiers.nursery import HEADER, MAX_MESSAGE, frame


class ForkServer:
    """The parent's end of the nursery process."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            environment = {**os.environ, "UPSHOT_NURSERY_PATH": json.dumps(sys.path)}
            self._process = subprocess.Popen(
                [sys.executable, "-m", "upshot.tasks.verifiers.nursery", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
            )
        self._control = ours

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return self._process.poll() is None

    def warm(self, source: str, options: Mapping[str, Any]) -> None:
        """Import what a verifier needs, so that workers forked from now on have it."""
        answer = self._ask({"op": "warm", "source": source, "options": dict(options)})
        if "error" in answer:
            raise UserError(f"verifier '{source}' cannot start in a worker process: {answer['error']}")

    def fork(self, memory_mb: int) -> tuple[int, socket.socket]:
        """A new worker: its process id and the socket to talk to it."""
        ours, theirs = socket.socketpair()
        with theirs:
            answer = self._ask({"op": "fork", "memory_mb": memory_mb}, [theirs.fileno()])
        ours.setblocking(False)
        return answer["pid"], ours

    def reap(self, pid: int) -> str:
        """Kill a worker if it still runs; how it ended, such as 'SIGSEGV'."""
        status = self._ask({"op": "reap", "pid": pid})["status"]
        return signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else f"exit {os.WEXITSTATUS(status)}"

    def close(self) -> None:
        """End the nursery and all its workers."""
        self._control.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ask(self, request: Mapping[str, Any], fds: list[int] | None = None) -> dict[str, Any]:
        socket.send_fds(self._control, [json.dumps(request).encode()], fds or [])
        data = b""
        while not data.endswith(b"\n"):
            part = self._control.recv(1 << 16)
            if not part:
                raise ConnectionError("the verifiers' nursery process is gone")
            data += part
        answer: dict[str, Any] = json.loads(data)
        return answer


COUNTED = ("items", "timeouts", "crashes", "forks")


class VerifierWorker:
    """One process and its socket."""

    def __init__(self, pid: int, sock: socket.socket, generation: int) -> None:
        self.pid = pid
        self.sock = sock
        self.generation = generation
        self.served = 0

    async def ask(self, message: bytes) -> dict[str, Any]:
        """Send a framed claim, wait for the answer; raises EOFError when the process is gone."""
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_sendall(self.sock, message)
            size = HEADER.unpack(await self._receive(loop, HEADER.size))[0]
            if size > MAX_MESSAGE:
                raise EOFError
            answer: dict[str, Any] = json.loads(await self._receive(loop, size))
        except (ConnectionError, BrokenPipeError) as error:
            raise EOFError from error
        self.served += 1
        return answer

    async def _receive(self, loop: asyncio.AbstractEventLoop, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            part = await loop.sock_recv(self.sock, min(1 << 16, size - len(parts)))
            if not part:
                raise EOFError
            parts += part
        return bytes(parts)


class VerifierWorkers:
    """A bounded set of workers on one event loop."""

    def __init__(self, count: int = 2, seconds: float = 10.0, memory_mb: int = 2048, recycle: int = 2000) -> None:
        self.count = count
        self.seconds = seconds
        self.memory_mb = memory_mb
        self.recycle = recycle
        self._slots = asyncio.Semaphore(count)
        self._idle: list[VerifierWorker] = []
        self._control = asyncio.Lock()
        self._nursery: ForkServer | None = None
        self._warmed: set[str] = set()
        self.stats: dict[str, int] = dict.fromkeys(COUNTED, 0)

    @pause_clock
    async def verify(self, claim: Claim) -> Score:
        """The score of a claim, within the limits."""
        request = {
            "source": claim.source,
            "options": dict(claim.options),
            "response": claim.response,
            "reference": claim.reference,
            "extra": dict(claim.extra),
        }
        try:
            message = frame(request)
        except (TypeError, ValueError) as error:
            return Score.missing(Reason.BAD_ROW, f"verifier: claim is not JSON: {error}"[:300])
        if len(message) > MAX_MESSAGE:
            return Score.missing(Reason.TOO_LONG, "verifier: claim too large", bytes=len(message))
        async with self._slots:
            worker = await self._take(claim)
            return await self._ask(worker, message)

    async def _ask(self, worker: VerifierWorker, message: bytes) -> Score:
        self.stats["items"] += 1
        try:
            answer = await asyncio.wait_for(worker.ask(message), self.seconds)
        except TimeoutError:
            self.stats["timeouts"] += 1
            await self._retire(worker)
            return Score.missing(Reason.TIMEOUT, f"verifier: took more than {self.seconds:g} s")
        except EOFError:
            self.stats["crashes"] += 1
            return Score.missing(Reason.CRASHED, f"verifier: crashed ({await self._retire(worker)})")
        except BaseException:  # cancelled in the middle of an item: this worker's next answer would be the wrong one
            await asyncio.shield(self._retire(worker))
            raise
        if worker.served >= self.recycle or answer["reason"] == Reason.CRASHED:
            await self._retire(worker)
        else:
            self._idle.append(worker)
        return Score(answer["value"], answer["reason"], answer["detail"])

    async def _take(self, claim: Claim) -> VerifierWorker:
        key = json.dumps([claim.source, dict(claim.options)], sort_keys=True)
        if key in self._warmed and self._idle and self._idle[-1].generation == len(self._warmed):
            return self._idle.pop()
        async with self._control:
            nursery = await self._started()
            if key not in self._warmed:
                await asyncio.to_thread(nursery.warm, claim.source, claim.options)
                self._warmed.add(key)
            while self._idle:
                worker = self._idle.pop()
                if worker.generation == len(self._warmed):
                    return worker
                await asyncio.to_thread(self._close, nursery, worker)  # forked before this verifier was warm
            self.stats["forks"] += 1
            pid, sock = await asyncio.to_thread(nursery.fork, self.memory_mb)
            return VerifierWorker(pid, sock, len(self._warmed))

    async def _started(self) -> ForkServer:
        if self._nursery is None or not self._nursery.alive:
            self._warmed.clear()
            self._idle.clear()
            self._nursery = await asyncio.to_thread(ForkServer)
        return self._nursery

    async def _retire(self, worker: VerifierWorker) -> str:
        async with self._control:
            nursery = self._nursery
            if nursery is None or not nursery.alive:
                worker.sock.close()
                return "nursery gone"
            return await asyncio.to_thread(self._close, nursery, worker)

    @staticmethod
    def _close(nursery: ForkServer, worker: VerifierWorker) -> str:
        worker.sock.close()
        return nursery.reap(worker.pid)

    async def aclose(self) -> None:
        """End all workers."""
        async with self._control:
            for worker in self._idle:
                worker.sock.close()
            self._idle.clear()
            if self._nursery is not None:
                await asyncio.to_thread(self._nursery.close)
                self._nursery = None
