"""Python sessions for tool use: one confined process per conversation, its state kept from turn to turn."""

from __future__ import annotations

import asyncio
import json
import logging
import marshal
import os
import signal
import socket
import struct
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from upshot.sandbox.cgroup import SlotGroup
from upshot.sandbox.inside.kernel import cpu_clock
from upshot.sandbox.limits import Limits
from upshot.sandbox.memory_files import bounded_output, sealed_input, written
from upshot.sandbox.outcome import Outcome, RunResult
from upshot.sandbox.runner import Session
from upshot.sandbox.verdict import Remains, ending
from upshot.sandbox.zygotes import Zygote, ZygoteGone
from upshot.time_limit import uncounted

if TYPE_CHECKING:
    from upshot.sandbox.pool import Sandbox
    from upshot.sandbox.slots import Slots

log = logging.getLogger("upshot.sandbox")
MAX_REPLY = 64 << 10
SOFT_STOP_SECONDS = 1.0
"""How long an interrupted turn has to come back before its session is ended."""
LIFETIME_SECONDS = 24 * 3600.0
LIFETIME_CPU_SECONDS = 3600.0


class SessionOver(Exception):
    """The session's process is gone."""


class LocalSession(Session):
    """A session in a zygote of its own."""

    def __init__(self, sandbox: Sandbox, zygote: Zygote, limits: Limits, files: list[int], wire: socket.socket) -> None:
        self.sandbox = sandbox
        self.zygote = zygote
        self.limits = limits
        self.files = files
        self.wire = wire
        self.pid = 0
        self.busy = False
        self.last_used = time.monotonic()
        self.over: str | None = None
        self.group: SlotGroup | None = None
        self._ended: asyncio.Task[dict[str, Any]] | None = None
        self._eviction: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, sandbox: Sandbox, slots: Slots, limits: Limits, tier: str = "plain") -> LocalSession:
        """Start a zygote and in it the session's process."""
        index = sandbox.next_session_index()
        group = slots.cgroups.slot(f"session-{index}")
        zygote = await slots.templates[tier].spawn(slots.spec(index, tier), group)
        output = limits.output_kb << 10
        ours, theirs = socket.socketpair()
        files = [os.open(os.devnull, os.O_RDONLY), bounded_output(output), bounded_output(output)]
        files += [sealed_input(marshal.dumps({})), bounded_output(4096), theirs.detach()]
        ours.setblocking(False)
        self = cls(sandbox, zygote, limits, files, ours)
        self.group = group
        sandbox.track_session(self)
        try:
            await self._start()
        except BaseException:
            await self.aclose()
            raise
        self._eviction = asyncio.create_task(self._evict_when_idle())
        return self

    async def _start(self) -> None:
        if self.group is not None:
            self.group.limit((self.limits.memory_mb + self.limits.disk_mb + 64) << 20, self.limits.processes + 8)
        limits = self.limits.as_request() | {"wall_seconds": LIFETIME_SECONDS, "cpu_seconds": LIFETIME_CPU_SECONDS}
        role = {"mode": "session", "fds": [0, 1, 2, 3, 4, 5], "environment": {}}
        request = {"roles": [role], "limits": limits, "announce": True}
        self.pid = await self.zygote.begin(request, self.files)
        os.close(self.files.pop())
        self._ended = asyncio.create_task(self._wait_for_end())
        if (await self._receive()).get("ready") is not True:
            raise ZygoteGone("the session did not start")

    async def _wait_for_end(self) -> dict[str, Any]:
        try:
            return await self.zygote.reply(LIFETIME_SECONDS + 60)
        except (ZygoteGone, OSError, TimeoutError) as error:
            return {"fault": str(error)}

    @uncounted
    async def turn(self, code: str, cpu_seconds: float | None = None) -> RunResult:
        """Run one turn; a turn out of time is interrupted, and the session ends only if that does not help."""
        if self.over is not None:
            return RunResult(Outcome.ERROR, None, detail=f"the session has ended: {self.over}")
        if self.busy:
            raise RuntimeError("a session runs one turn at a time")
        self.busy = True
        for descriptor in self.files[1:3]:
            os.lseek(descriptor, 0, os.SEEK_SET)
        started, clock = time.monotonic(), time.clock_gettime(cpu_clock(self.pid))
        try:
            reply, timed_out = await self._exchange(code, self.limits.with_cpu(cpu_seconds))
            used = time.clock_gettime(cpu_clock(self.pid)) - clock
            return self._result(reply, timed_out, time.monotonic() - started, used)
        except (SessionOver, OSError) as error:
            return await self._final_result(str(error), time.monotonic() - started)
        finally:
            self.busy = False
            self.last_used = time.monotonic()

    async def _exchange(self, code: str, limits: Limits) -> tuple[dict[str, Any], bool]:
        data = json.dumps({"code": code}).encode()
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self.wire, struct.pack("<I", len(data)) + data)
        answer = asyncio.ensure_future(self._receive())
        try:
            if await self._within(answer, limits):
                return answer.result(), False
            os.kill(self.pid, signal.SIGINT)
            done, _ = await asyncio.wait([answer], timeout=SOFT_STOP_SECONDS)
            if done:
                return answer.result(), True
            self.over = "a turn ran out of time and did not stop when interrupted"
            raise SessionOver(self.over)
        finally:
            answer.cancel()

    async def _within(self, answer: asyncio.Future[dict[str, Any]], limits: Limits) -> bool:
        """Whether the answer comes before a clock runs out."""
        start_cpu, deadline = time.clock_gettime(cpu_clock(self.pid)), time.monotonic() + limits.wall
        while True:
            used = time.clock_gettime(cpu_clock(self.pid)) - start_cpu
            left = min(limits.cpu_seconds - used, deadline - time.monotonic())
            if left <= 0:
                return False
            done, _ = await asyncio.wait([answer], timeout=left + 0.005)
            if done:
                return True

    async def _receive(self) -> dict[str, Any]:
        (size,) = struct.unpack("<I", await self._exactly(4))
        if size > MAX_REPLY:
            raise SessionOver("it broke the protocol")
        try:
            message = json.loads(await self._exactly(size))
        except (ValueError, RecursionError) as error:
            raise SessionOver("it broke the protocol") from error
        if not isinstance(message, dict):
            raise SessionOver("it broke the protocol")
        return message

    async def _exactly(self, size: int) -> bytes:
        loop = asyncio.get_running_loop()
        data = b""
        while len(data) < size:
            part = await loop.sock_recv(self.wire, size - len(data))
            if not part:
                raise SessionOver("its process ended")
            data += part
        return data

    def _result(self, reply: dict[str, Any], timed_out: bool, wall: float, cpu: float, detail: str = "") -> RunResult:
        stdout, stdout_cut = written(self.files[1])
        stderr, stderr_cut = written(self.files[2])
        error = reply.get("error")
        outcome = Outcome.ERROR if error else Outcome.PASSED
        if timed_out:
            outcome, detail = Outcome.TIMEOUT, "interrupted: out of time; the session's state is kept"
        elif stdout_cut or stderr_cut:
            outcome = Outcome.OUTPUT_LIMIT
        elif error and isinstance(error, list) and error[0] == "MemoryError":
            outcome = Outcome.OUT_OF_MEMORY
        return RunResult(
            outcome=outcome,
            exit_code=None,
            stdout=stdout.decode(errors="replace"),
            stderr=stderr.decode(errors="replace"),
            stdout_cut=stdout_cut,
            stderr_cut=stderr_cut,
            wall_seconds=wall,
            cpu_seconds=cpu,
            detail=detail,
        )

    async def _final_result(self, reason: str, wall: float) -> RunResult:
        """The result of the turn the session did not survive."""
        self.zygote.end_run()
        report = await asyncio.wait_for(asyncio.shield(self._ended), 5) if self._ended else {}
        child = (report.get("children") or [{}])[0]
        timed_out = self.over is not None
        oom = self.group is not None and self.group.oom_kills() > 0
        clock = child.get("why") if child.get("why") in ("cpu", "wall") else None
        remains = Remains(status=child.get("status", 0), why="cpu" if timed_out else clock, wall=wall, oom=oom)
        outcome, detail = ending(remains) or (Outcome.ERROR, reason)
        self.over = self.over or detail
        result = self._result({}, False, wall, child.get("cpu", 0.0))
        await self.aclose()
        return replace(result, outcome=outcome, detail=f"{detail}; the session has ended")

    async def _evict_when_idle(self) -> None:
        idle = self.sandbox.session_idle_seconds
        while self.over is None:
            wait = self.last_used + idle - time.monotonic()
            if self.busy or wait > 0:
                await asyncio.sleep(max(wait, 0.05))
                continue
            self.over = f"idle for {idle:.0f} s"
            log.info("session evicted: %s", self.over)
            self._eviction = None
            await self.aclose()

    async def aclose(self) -> None:
        """End the session and everything it started."""
        self.over = self.over or "closed"
        self.sandbox.forget_session(self)
        for task in (self._eviction, self._ended):
            if task is not None and task is not asyncio.current_task():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        self._eviction = None
        self.wire.close()
        self.zygote.close()
        for descriptor in self.files:
            os.close(descriptor)
        self.files = []
        if self.group is not None:
            await asyncio.to_thread(self.group.remove)
            self.group = None
