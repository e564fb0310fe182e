"""Worker processes that verify claims and can be killed: time and memory limits that really hold.

One item at a time per worker. An item that hangs, crashes or eats memory costs itself: its score is missing with the
reason, its worker is replaced, its neighbours never notice.

Three kinds of processes. `VerifierWorkers` lives in the program and hands out the claims. It starts one fork server,
which imports what verifiers need (sympy takes a second) and forks the workers, so that replacing a killed one takes
milliseconds; a plain fork of a training process would copy the locks that its threads hold. multiprocessing's own fork
server does not serve: it runs the program's main script again in every worker, and imports nothing more once it runs.
The program speaks to the fork server over a pipe of multiprocessing's, and to a worker in lines of JSON. When the
program ends, however it ends, the others end with it.

Covers verifiers that compute. Those that wait for a model or a sandbox stay with their event loop (`waits`).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import multiprocessing
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Mapping
from functools import cache
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

from upshot.core.errors import UserError
from upshot.core.process import die_with_parent
from upshot.core.score import Reason, Score
from upshot.core.time_limit import pause_clock
from upshot.tasks.verifiers.base import Claim, Verifier, verifiers

MAX_MESSAGE = 64 * 2**20
COUNTED = ("items", "timeouts", "crashes", "forks")
_START = """
import json, sys
sys.path[:] = json.loads(sys.argv[2])  # first of all: it must find the same modules as the program
from upshot.tasks.verifiers.workers import serve_forks
serve_forks(int(sys.argv[1]))
"""


class VerifierWorkers:
    """A bounded set of workers on one event loop."""

    def __init__(self, count: int, seconds: float, memory_mb: int, recycle: int, counts: Counter[str]) -> None:
        self.seconds = seconds
        self.memory_mb = memory_mb
        self.recycle = recycle
        self.counts = counts
        self.counts.update(dict.fromkeys(COUNTED, 0))
        self._slots = asyncio.Semaphore(count)
        self._idle: list[VerifierWorker] = []
        self._control = asyncio.Lock()
        self._server: ForkServer | None = None
        self._warmed: set[str] = set()

    @pause_clock
    async def verify(self, claim: Claim) -> Score:
        """The score of a claim, within the limits."""
        try:
            plain = {"extra": dict(claim.extra), "options": dict(claim.options)}
            line = _line({"source": claim.source, "response": claim.response, "reference": claim.reference, **plain})
        except (TypeError, ValueError) as error:
            return Score.missing(Reason.BAD_ROW, f"verifier: claim is not JSON: {error}"[:300])
        if len(line) > MAX_MESSAGE:
            return Score.missing(Reason.TOO_LONG, "verifier: claim too large", bytes=len(line))
        async with self._slots:
            worker = await self._take(claim)
            return await self._ask(worker, line)

    async def _ask(self, worker: VerifierWorker, line: bytes) -> Score:
        self.counts["items"] += 1
        try:
            answer = await asyncio.wait_for(worker.ask(line), self.seconds)
        except TimeoutError:
            self.counts["timeouts"] += 1
            await self._retire(worker)
            return Score.missing(Reason.TIMEOUT, f"verifier: took more than {self.seconds:g} s")
        except EOFError:
            self.counts["crashes"] += 1
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
        """An idle worker that has the claim's verifier, else a new one; the first claim of a verifier warms it."""
        options = json.dumps(dict(claim.options), sort_keys=True)
        key = f"{claim.source} {options}"
        if key in self._warmed and self._idle and self._idle[-1].generation == len(self._warmed):
            return self._idle.pop()
        async with self._control:
            if self._server is None or not self._server.alive:
                self._warmed.clear()
                self._idle.clear()
                self._server = await asyncio.to_thread(ForkServer)
            server = self._server
            if key not in self._warmed:
                await asyncio.to_thread(server.warm, claim.source, options)
                self._warmed.add(key)
            while self._idle:
                worker = self._idle.pop()
                if worker.generation == len(self._warmed):
                    return worker
                worker.close()  # forked before this verifier was warm: it would pay for the imports itself
                await asyncio.to_thread(server.reap, worker.pid)
            self.counts["forks"] += 1
            pid, connection = await asyncio.to_thread(server.fork, self.memory_mb)
            streams = await asyncio.open_connection(sock=connection, limit=MAX_MESSAGE)
            return VerifierWorker(pid, *streams, len(self._warmed))

    async def _retire(self, worker: VerifierWorker) -> str:
        """End a worker; how it ended."""
        worker.close()
        async with self._control:
            if self._server is None or not self._server.alive:
                return "fork server gone"
            return await asyncio.to_thread(self._server.reap, worker.pid)

    async def aclose(self) -> None:
        """End all workers."""
        async with self._control:
            for worker in self._idle:
                worker.close()
            self._idle.clear()
            if self._server is not None:
                await asyncio.to_thread(self._server.close)
                self._server = None


class VerifierWorker:
    """One worker process as the program sees it."""

    def __init__(self, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, generation: int) -> None:
        self.pid = pid
        self.generation = generation
        """How many verifiers were warm when it was forked."""
        self.served = 0
        self._reader = reader
        self._writer = writer

    async def ask(self, line: bytes) -> dict[str, Any]:
        """Send a claim, wait for the answer; raises EOFError when the process is gone or babbles."""
        try:
            self._writer.write(line)
            await self._writer.drain()
            reply = await self._reader.readline()
            if not reply.endswith(b"\n"):
                raise EOFError
            answer: dict[str, Any] = json.loads(reply)
        except (ConnectionError, ValueError) as error:
            raise EOFError from error
        self.served += 1
        return answer

    def close(self) -> None:
        """Close the connection; the process is reaped by its fork server."""
        self._writer.close()


class ForkServer:
    """The fork server as the program sees it. Calls wait for its answer: from a thread."""

    def __init__(self) -> None:
        self._control, theirs = multiprocessing.Pipe()
        with theirs:
            command = [sys.executable, "-c", _START, str(theirs.fileno()), json.dumps(sys.path)]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        self._turn = threading.Lock()
        """Who was cancelled has left a thread behind that still waits: its answer must not become the next one's."""

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return self._process.poll() is None

    def warm(self, source: str, options: str) -> None:
        """Import what a verifier needs, so that workers forked from now on have it."""
        answer = self._ask({"op": "warm", "source": source, "options": options})
        if "error" in answer:
            raise UserError(f"verifier '{source}' cannot start in a worker process: {answer['error']}")

    def fork(self, memory_mb: int) -> tuple[int, socket.socket]:
        """A new worker: its process id and the socket to talk to it."""
        ours, theirs = socket.socketpair()
        with theirs:
            answer = self._ask({"op": "fork", "memory_mb": memory_mb}, theirs.fileno())
        return answer["pid"], ours

    def reap(self, pid: int) -> str:
        """Kill a worker if it still runs; how it ended, such as 'SIGSEGV'. Its parent alone can ask."""
        status = self._ask({"op": "reap", "pid": pid})["status"]
        return signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else f"exit {os.WEXITSTATUS(status)}"

    def close(self) -> None:
        """End it and all its workers."""
        self._control.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ask(self, request: Mapping[str, Any], descriptor: int | None = None) -> Any:
        with self._turn:
            try:
                self._control.send(request)
                if descriptor is not None:
                    reduction.send_handle(self._control, descriptor, self._process.pid)
                return self._control.recv()
            except EOFError as error:
                raise ConnectionError("the fork server of the verifiers is gone") from error


def serve_forks(fd: int) -> None:
    """The fork server's life: answer fork, warm and reap requests until the program closes the socket. No threads."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the program's to handle
    die_with_parent()
    control = Connection(fd)
    while True:
        try:
            request = control.recv()
        except EOFError:
            return
        if request["op"] == "fork":
            answer: dict[str, Any] = {"pid": _fork(control, reduction.recv_handle(control), request["memory_mb"])}
        elif request["op"] == "reap":
            with contextlib.suppress(ProcessLookupError):
                os.kill(request["pid"], signal.SIGKILL)
            answer = {"status": os.waitpid(request["pid"], 0)[1]}
        else:
            answer = _warm(request["source"], request["options"])
        control.send(answer)


def _warm(source: str, options: str) -> dict[str, str]:
    try:
        _verifier(source, options).warm()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    gc.collect()
    gc.freeze()  # keeps the collector from copying the shared pages of every worker
    return {}


def _fork(control: Connection, fd: int, memory_mb: int) -> int:
    pid = os.fork()
    if pid:
        os.close(fd)
        return pid
    code = 1
    try:
        control.close()
        die_with_parent()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(ValueError, OSError):  # a lower hard limit is already in force: keep it
            resource.setrlimit(resource.RLIMIT_AS, (memory_mb * 2**20, memory_mb * 2**20))
        with socket.socket(fileno=fd) as connection:
            serve_claims(connection)
        code = 0
    finally:
        os._exit(code)  # not sys.exit: what the fork server has registered and buffered is not this child's to finish


def serve_claims(connection: socket.socket) -> None:
    """A worker's life: read a claim, verify it, answer; until the connection closes or memory runs out."""
    with connection.makefile("rwb") as lines:
        while line := lines.readline():
            score = check_claim(Claim(**json.loads(line)))
            lines.write(_line({"value": score.value, "reason": score.reason, "detail": dict(score.detail)}))
            lines.flush()
            if score.reason == Reason.CRASHED:
                return


def check_claim(claim: Claim) -> Score:
    """The score of a claim; whatever the verifier raises becomes a missing score with the reason."""
    try:
        verifier = _verifier(claim.source, json.dumps(claim.options, sort_keys=True))
        verdict = verifier.score(claim.response, claim.reference, claim.extra)
        score = Score.of(verdict, f"verifier '{claim.source}'")
        json.dumps(dict(score.detail))  # a detail that is not JSON must fail here, as this item's own error
    except MemoryError:
        return Score.missing(Reason.CRASHED, "verifier: out of memory")
    except Exception as error:  # an item's failure is its own: reported, counted, never fatal
        return Score.failed(error, "verifier")
    return score


@cache
def _verifier(source: str, options: str) -> Verifier:
    return verifiers.create(source, json.loads(options))


def _line(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"
