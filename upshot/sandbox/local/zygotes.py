"""The supervisor's side of templates and zygotes: start them, talk to them, notice when one is gone.

    supervisor ─starts▶ template (one a tier, warm) ─forks▶ zygote (one a slot, walled in) ─clones▶ run

All messages are datagrams of JSON on SOCK_SEQPACKET pairs: a message arrives whole or not at all, and both sides notice
a closed end immediately. Descriptors are sent along with the message (SCM_RIGHTS).

- To a template: {"walls", "workbench", "extra_paths"} with one end of a new socket pair. It answers {"pid"}; the
  zygote it forked answers {"ready": true} on the pair when its walls are up, or says why they are not. There is one
  exchange at a time, and it is always finished, even if the caller has given up: an unread answer would be taken for
  the answer to the next request.
- To a zygote: {"roles", "limits"} with the run's memory files (`run.py`). It answers with a report when all of the
  request's children have ended: {"children": [...], "wall"}, or {"fault"} if none could be started.
- With "announce" (a session, whose run stays) it first answers {"pids"}; any message then means: end the run.

Closing the supervisor's end ends a zygote and its run. So does the supervisor's death (PR_SET_PDEATHSIG, and a hang-up
for which the zygote polls), so no cleaning up depends on a process that may be dead.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
from typing import Any

from upshot.sandbox.local.cgroup import SlotGroup
from upshot.sandbox.local.layers import QUIET_ENVIRONMENT, command

START_SECONDS = 60.0
REPLY_BYTES = 65536

_PLAIN = [
    "abc", "array", "bisect", "builtins", "calendar", "cmath", "collections", "collections.abc", "contextlib", "copy",
    "dataclasses", "datetime", "decimal", "encodings.idna", "encodings.latin_1", "enum", "fractions", "functools",
    "heapq", "io", "itertools", "json", "linecache", "math", "numbers", "operator", "os", "queue", "random", "re",
    "statistics", "string", "struct", "sys", "textwrap", "threading", "time", "traceback", "types", "typing",
    "warnings", "weakref",
]  # fmt: skip
TIERS: dict[str, list[str]] = {
    "plain": _PLAIN,
    "numpy": [*_PLAIN, "numpy"],
    "scientific": [*_PLAIN, "numpy", "pandas", "scipy", "scipy.stats", "scipy.optimize", "scipy.linalg", "sympy"],
    "native": ["subprocess"],
}


class ZygoteGone(Exception):
    """A zygote or template ended or could not be started."""


class Template:
    """One tier's template process."""

    def __init__(self, tier: str) -> None:
        self.tier = tier
        self._lock = asyncio.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._spawning: set[asyncio.Future[Zygote]] = set()

    async def spawn(self, spec: dict[str, Any], group: SlotGroup | None) -> Zygote:
        """A fresh zygote forked from the template, which is started (again) if it is not running."""
        task = asyncio.ensure_future(self._spawn(spec, group))
        self._spawning.add(task)
        task.add_done_callback(self._spawning.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            # The exchange with the template must be finished, or the next one would read its answer.
            task.add_done_callback(_close_unwanted)
            raise

    async def _spawn(self, spec: dict[str, Any], group: SlotGroup | None) -> Zygote:
        async with self._lock:
            if self._process is None or self._process.poll() is not None:
                await self._start()
            assert self._control is not None
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.setblocking(False)
            try:
                socket.send_fds(self._control, [json.dumps(spec).encode()], [theirs.fileno()])
                born = await _reply(self._control)
            except OSError as error:
                ours.close()
                raise ZygoteGone(f"the {self.tier} template is gone: {error}") from error
            finally:
                theirs.close()
        zygote = Zygote(born["pid"], ours, group)
        try:
            ready = await _reply(ours)
            if not ready.get("ready"):
                raise ZygoteGone(f"a zygote could not isolate itself: {ready.get('error')}")
            if group is not None:
                group.adopt(zygote.pid)
        except (ZygoteGone, OSError):
            zygote.close()
            raise
        return zygote

    async def _start(self) -> None:
        self._stop()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        spec = {"modules": TIERS[self.tier], "environment": {n: v for n, v in QUIET_ENVIRONMENT.items() if n != "PATH"}}
        # Started from the event loop's own thread: the kernel ends the template when the thread that started it ends.
        arguments = command("zygote", str(theirs.fileno()), json.dumps(spec))
        silent: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        self._process = subprocess.Popen(
            arguments, pass_fds=(theirs.fileno(),), env=QUIET_ENVIRONMENT, cwd="/", start_new_session=True, **silent
        )
        theirs.close()
        self._control = ours
        await _reply(ours)

    def close(self) -> None:
        """End the template, and with it every zygote that it forked."""
        for task in self._spawning:
            task.cancel()
        self._stop()

    def _stop(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


class Zygote:
    """One live zygote; serves one run at a time."""

    def __init__(self, pid: int, control: socket.socket, group: SlotGroup | None) -> None:
        self.pid = pid
        self.control = control
        self.group = group
        self.runs = 0
        self.closed = False
        self._waiting = False

    def send(self, request: dict[str, Any], descriptors: list[int]) -> None:
        """Send one request with its files; raises ZygoteGone if the zygote has ended."""
        self.runs += 1
        try:
            socket.send_fds(self.control, [json.dumps(request).encode()], descriptors)
        except OSError as error:
            self.close()
            raise ZygoteGone(f"zygote {self.pid} is gone: {error}") from error

    async def finish(self, patience: float) -> dict[str, Any]:
        """The report of the request sent, or of the run started; raises ZygoteGone if none comes."""
        self._waiting = True
        try:
            return await _reply(self.control, patience)
        except BaseException as error:
            self._waiting = False
            self.close()
            if isinstance(error, OSError | ZygoteGone):
                raise ZygoteGone(f"zygote {self.pid} is gone: {error or type(error).__name__}") from error
            raise
        finally:
            self._waiting = False

    async def begin(self, request: dict[str, Any], descriptors: list[int]) -> int:
        """Start a run that stays; returns its process id."""
        self.send(request, descriptors)
        started = await self.finish(START_SECONDS)
        if "pids" not in started:
            raise ZygoteGone(f"zygote {self.pid} could not start a run: {started.get('fault')}")
        return int(started["pids"][0])

    def end_run(self) -> None:
        """Make the zygote end the run started before; its report follows."""
        with contextlib.suppress(OSError):
            self.control.send(b"end")

    def close(self) -> None:
        """End the zygote and its run; a task that waits for the run notices the closed socket."""
        if self.control.fileno() < 0:
            return
        self.closed = True
        if not self._waiting:
            self.control.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


def _close_unwanted(task: asyncio.Future[Zygote]) -> None:
    if not task.cancelled() and task.exception() is None:
        task.result().close()


async def _reply(control: socket.socket, patience: float = START_SECONDS) -> dict[str, Any]:
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(patience):
        data = await loop.sock_recv(control, REPLY_BYTES)
    if not data:
        raise ZygoteGone("it closed the connection")
    return json.loads(data)
