"""Python sessions for tool use: one confined process per conversation, its state kept from turn to turn.

A session has its own zygote with a single long run. Turns go over a separate socket, one line of JSON each: {"code"} is
the request, {"error"} the answer; output goes to the two output files, which are rewound before each turn. We measure
the time of a turn, since the run's own limits are those of a day. A turn that is out of time, or that nobody waits for
any more, is interrupted (SIGINT, by pidfd), and its answer is still read, because the next turn would get it. If no
answer comes within a second, or the socket breaks, the session is over, and the zygote's report says how its process
ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import marshal
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from upshot.core.time_limit import pause_clock
from upshot.sandbox.asserts.verdict import Remains, of_script
from upshot.sandbox.inside import cpu_time
from upshot.sandbox.limits import Limits
from upshot.sandbox.local.run import bounded_output, read_printed, sealed_input
from upshot.sandbox.local.slots import SandboxSlots
from upshot.sandbox.local.zygotes import Zygote, ZygoteGone
from upshot.sandbox.outcome import Outcome, RunResult
from upshot.sandbox.runner import Session

log = logging.getLogger("upshot.sandbox")
MAX_REPLY = 64 << 10
SOFT_STOP_SECONDS = 1.0
"""Seconds for an interrupted turn to return before its session is ended."""
LIFETIME_SECONDS = 24 * 3600.0
LIFETIME_CPU_SECONDS = 3600.0
FAILED = 1 << 8
"""The wait status of a process that ended with exit code 1, as a turn that raised would."""
Forget = Callable[["LocalSession"], None]


class SessionOver(Exception):
    """The session's process is gone."""


class TurnTooLong(SessionOver):
    """A turn ran out of time and did not stop when interrupted."""


class LocalSession(Session):
    """A session in its own zygote."""

    def __init__(self, zygote: Zygote, limits: Limits, idle_seconds: float, forget: Forget) -> None:
        self.zygote = zygote
        self.limits = limits
        self.idle_seconds = idle_seconds
        """A session unused for this long is ended."""
        self.forget = forget
        """Called when the session has ended."""
        self.wire, theirs = socket.socketpair()
        self.streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        """Our end of the socket for turns."""
        output = limits.output_kb << 10
        self.files = [os.open(os.devnull, os.O_RDONLY), bounded_output(output), bounded_output(output)]
        self.files += [sealed_input(marshal.dumps({})), bounded_output(4096), theirs.detach()]
        self.pid = 0
        self.handles: list[int] = []
        """Our descriptors of /proc and of the session's process, whose id may later belong to another process."""
        self.last_used = time.monotonic()
        self.over: str | None = None
        self._turns = asyncio.Lock()
        self._working: asyncio.Future[RunResult] | None = None
        self._ended: asyncio.Task[dict[str, Any]] | None = None
        self._eviction: asyncio.Task[None] | None = None

    @classmethod
    async def open(
        cls, slots: SandboxSlots, index: int, limits: Limits, idle_seconds: float, forget: Forget
    ) -> LocalSession:
        """Start a zygote, with a number after those of the slots, and in it the session's process."""
        group = slots.cgroups.slot(f"session-{index}")
        zygote = await slots.templates["plain"].spawn(slots.spec(index, "plain"), group)
        self = cls(zygote, limits, idle_seconds, forget)
        try:
            await self._start()
        except BaseException:
            await self.aclose()
            raise
        self._eviction = asyncio.create_task(self._evict_when_idle())
        return self

    @property
    def busy(self) -> bool:
        """Whether a turn is running."""
        return self._turns.locked()

    async def _start(self) -> None:
        if self.zygote.group is not None:
            self.zygote.group.limit_to(self.limits)
        limits = self.limits.as_request() | {"wall_seconds": LIFETIME_SECONDS, "cpu_seconds": LIFETIME_CPU_SECONDS}
        role = {"mode": "session", "fds": [0, 1, 2, 3, 4, 5], "environment": {}}
        request = {"roles": [role], "limits": limits, "announce": True}
        self.pid = await self.zygote.begin(request, self.files)
        self.handles = [cpu_time.open_proc(), os.pidfd_open(self.pid)]
        os.close(self.files.pop())
        self._ended = asyncio.create_task(self.zygote.finish(LIFETIME_SECONDS + 60))
        self.streams = await asyncio.open_connection(sock=self.wire, limit=MAX_REPLY)
        if (await self._receive()).get("ready") is not True:
            raise ZygoteGone("the session did not start")

    @pause_clock
    async def turn(self, code: str, cpu_seconds: float | None = None) -> RunResult:
        """Run one turn, after earlier ones; one out of time is interrupted, and if it goes on, the session ends.

        A turn that nobody waits for any more is interrupted, too, and its answer is read, so that the next turn does
        not get it.
        """
        await self._turns.acquire()
        abandoned = asyncio.get_running_loop().create_future()
        work = asyncio.ensure_future(self._turn(code, self.limits.with_cpu(cpu_seconds), abandoned))
        self._working = work
        work.add_done_callback(lambda _: self._turns.release())
        try:
            return await asyncio.shield(work)
        finally:
            if not abandoned.done():
                abandoned.set_result(None)

    async def _turn(self, code: str, limits: Limits, abandoned: asyncio.Future[None]) -> RunResult:
        if self.over is not None:
            return RunResult(Outcome.ERROR, None, detail=f"the session has ended: {self.over}")
        started = time.monotonic()
        try:
            for descriptor in self.files[1:3]:
                os.lseek(descriptor, 0, os.SEEK_SET)
            clock = self._cpu()
            reply, timed_out = await self._exchange(code, limits, abandoned)
            error, spent = reply.get("error"), {"wall": time.monotonic() - started, "cpu": self._cpu() - clock}
            result = self._result(status=FAILED if error else 0, lines=[{"e": error}], **spent)
            late = "interrupted: out of time; the session's state is kept"
            return replace(result, outcome=Outcome.TIMEOUT, detail=late) if timed_out else result
        except (SessionOver, OSError) as error:
            return await self._final_result(error, time.monotonic() - started)
        finally:
            self.last_used = time.monotonic()

    def _cpu(self) -> float:
        """CPU seconds of the session's processes so far."""
        try:
            return cpu_time.of_family(self.handles[0], self.pid)
        except OSError as error:
            raise SessionOver("its process ended between turns") from error

    async def _exchange(
        self, code: str, limits: Limits, abandoned: asyncio.Future[None]
    ) -> tuple[dict[str, Any], bool]:
        answer = asyncio.ensure_future(self._ask(code))
        try:
            in_time = await self._within(answer, limits, abandoned)
            if not in_time:
                signal.pidfd_send_signal(self.handles[1], signal.SIGINT)
                await asyncio.wait([answer], timeout=SOFT_STOP_SECONDS)
            if not answer.done():
                raise TurnTooLong("a turn ran out of time and did not stop when interrupted")
            return answer.result(), not in_time
        finally:
            answer.cancel()
            await asyncio.gather(answer, return_exceptions=True)

    async def _within(
        self, answer: asyncio.Future[dict[str, Any]], limits: Limits, abandoned: asyncio.Future[None]
    ) -> bool:
        """Whether the answer comes before a clock runs out or the caller gives up."""
        start_cpu, deadline = self._cpu(), time.monotonic() + limits.wall
        while not abandoned.done():
            left = min(limits.cpu_seconds - (self._cpu() - start_cpu), deadline - time.monotonic())
            if left <= 0:
                return False
            waiting: list[asyncio.Future[Any]] = [answer, abandoned]
            await asyncio.wait(waiting, timeout=left + 0.005, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                return True
        return False

    async def _ask(self, code: str) -> dict[str, Any]:
        assert self.streams is not None
        self.streams[1].write(json.dumps({"code": code}).encode() + b"\n")
        await self.streams[1].drain()
        return await self._receive()

    async def _receive(self) -> dict[str, Any]:
        assert self.streams is not None
        try:
            line = await self.streams[0].readline()
            if not line.endswith(b"\n"):
                raise SessionOver("its process ended")
            message = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise SessionOver("it broke the protocol") from error
        if not isinstance(message, dict):
            raise SessionOver("it broke the protocol")
        return message

    def _result(self, **ended: Any) -> RunResult:
        """The turn's output, and how it ended."""
        return replace(of_script(Remains(**read_printed(*self.files[1:3]), **ended)), exit_code=None)

    async def _final_result(self, error: Exception, wall: float) -> RunResult:
        """The result of the turn that ended the session."""
        self.zygote.end_run()
        child: dict[str, Any] = {}
        if self._ended is not None and (await asyncio.wait([self._ended], timeout=5))[0]:
            with contextlib.suppress(ZygoteGone, LookupError):
                child = self._ended.result()["children"][0]
        oom = self.zygote.group is not None and self.zygote.group.oom_kills() > 0
        clock = child.get("why") if child.get("why") in ("cpu", "wall") else None
        why = "cpu" if isinstance(error, TurnTooLong) else clock
        result = self._result(status=child.get("status", 0), why=why, wall=wall, oom=oom, cpu=child.get("cpu", 0.0))
        if self.over is not None:  # another task has closed it meanwhile
            result = replace(result, outcome=Outcome.ERROR, detail=self.over)
        elif result.outcome is Outcome.OUTPUT_LIMIT or not result.detail:  # no clock, signal or memory limit ended it
            result = replace(result, outcome=Outcome.ERROR, detail=str(error))
        self.over = result.detail if why is None else str(error)
        await self.aclose()
        return replace(result, detail=f"{result.detail}; the session has ended")

    async def _evict_when_idle(self) -> None:
        while self.over is None:
            wait = self.last_used + self.idle_seconds - time.monotonic()
            if self.busy or wait > 0:
                await asyncio.sleep(max(wait, 0.05))
                continue
            self.over = f"idle for {self.idle_seconds:.0f} s"
            log.info("session evicted: %s", self.over)
            self._eviction = None
            await self.aclose()

    async def aclose(self) -> None:
        """End the session and everything it started; a running turn gets the error that the session has ended."""
        self.over = self.over or "closed"
        self.forget(self)
        with contextlib.suppress(OSError):
            self.wire.shutdown(socket.SHUT_RDWR)
        if self._working is not None and self._working is not asyncio.current_task():
            await asyncio.wait([self._working])
        for task in (self._eviction, self._ended):
            if task is not None and task is not asyncio.current_task():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        self._eviction = None
        (self.streams[1] if self.streams else self.wire).close()
        self.zygote.close()
        for descriptor in [*self.files, *self.handles]:
            os.close(descriptor)
        self.files, self.handles = [], []
        group, self.zygote.group = self.zygote.group, None
        if group is not None:
            await asyncio.to_thread(group.remove)
