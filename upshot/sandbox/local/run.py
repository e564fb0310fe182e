"""One run's message and memory files: sent to a zygote, collected when it is over.

Everything a run reads and writes is an anonymous file in memory (memfd) that the supervisor opens and the zygote passes
on unread: programs and inputs never enter a zygote's memory, which later runs inherit. The message that comes with the
files says only which child plays which role on which of them. Inputs are sealed: neither a child nor a zygote can
change what another reads. Outputs have a fixed size, so the kernel stops a program that prints without end, and nobody
has to drain a pipe for it. They are read when the run is over, up to the position of the program's last write.

A judged run has two children. The program gets no tests, and the judge gets no program: each gets one end of a socket
pair, and its own input. The judge's results count; whatever the program writes in place of results is dropped.
"""

from __future__ import annotations

import fcntl
import marshal
import os
import signal
import socket
from typing import Any

from upshot.sandbox.asserts import verdict
from upshot.sandbox.asserts.verdict import Remains
from upshot.sandbox.limits import Limits
from upshot.sandbox.local.zygotes import Zygote, ZygoteGone

SLACK = 8192
"""Room beyond the limit: the kernel refuses a write that would cross the end by whole pages."""
PATIENCE = 10.0
"""Seconds beyond the wall cap, at its longest, before a silent zygote is given up."""
OWN_RESULTS_BYTES = 4096
"""Size of a judged program's own result file, whose content is never read: the judge's results count."""
DEVICES = "/dev"
"""Here /dev/stdin and its like are links into /proc. It is mounted only for programs that name the folder, because the
mount costs time."""
ALONE = ("stdin", "stdout", "stderr", "input", "results")
"""A child's files, by the number of the descriptor it finds each on."""
JUDGED = ("stdin", "stdout", "stderr", "input", "own results", "program's wire")
JUDGE = ("nothing", "nothing", "nothing", "tests", "results", "judge's wire")


class RunRequest:
    """A request to a zygote. It can be repeated with another zygote, because each attempt makes new files."""

    def __init__(
        self,
        mode: str,
        payload: dict[str, Any],
        limits: Limits,
        stdin: bytes = b"",
        judge: dict[str, Any] | None = None,
        native_wall: float | None = None,
    ) -> None:
        self.limits = limits
        self.files: dict[str, int] = {}
        """The files by name, in the order in which they are sent."""
        self.stdin, self.payload, self.judge = stdin, payload, judge
        self.parts = [(mode, ALONE if judge is None else JUDGED, payload.get("environment", {}))]
        if judge is not None:
            self.parts.append(("judge", JUDGE, {}))
        asked = payload.get("calls", payload.get("tests", payload.get("inputs", ())))
        tests = judge["tests"] if judge is not None else asked
        self.most_lines = len(tests) + len(payload.get("fetch", ())) + 4
        self.request_limits = limits.as_request()
        if mode == "script" and DEVICES in payload["program"]:
            self.request_limits["proc"] = True
        if native_wall is not None:
            self.request_limits |= {"native": True, "wall_seconds": native_wall, "cpu_seconds": native_wall}

    async def run_on(self, zygote: Zygote) -> Remains:
        """Run on a zygote and collect what the run left."""
        group = zygote.group
        try:
            self._open_files()
            if group is not None:
                group.limit_to(self.limits)
            sent = list(self.files)
            roles = [
                {"mode": mode, "fds": [*map(sent.index, names)], "environment": environment}
                for mode, names, environment in self.parts
            ]
            zygote.send({"roles": roles, "limits": self.request_limits}, list(self.files.values()))
            # Our copies of the sockets between program and judge: while they are open, neither notices the other's end.
            self._close("program's wire", "judge's wire")
            try:
                reply = await zygote.finish(2 * float(self.request_limits["wall_seconds"]) + PATIENCE)
            except ZygoteGone as error:
                # The zygote died because the run's own group ran out of memory, or it was silent for longer than the
                # longest possible run: once the walls are up, the program is the cause.
                if self._has_started() and group is not None and group.new_oom_kills():
                    return Remains(status=signal.SIGKILL, oom=True)
                if self._has_started() and isinstance(error.__cause__, TimeoutError):
                    return Remains(status=signal.SIGKILL, why="wall", wall=self.limits.wall)
                raise
            # A SIGKILL that the zygote did not send comes from the program, or from the kernel: out of memory.
            killed = any(child["status"] == signal.SIGKILL and not child["why"] for child in reply.get("children", ()))
            return self._remains(reply, oom=killed and group is not None and group.new_oom_kills())
        finally:
            self._close(*self.files)

    def _has_started(self) -> bool:
        """Whether the program's walls were up: then there is a first line in its results, or in its own result file."""
        return os.lseek(self.files[self.parts[0][1][4]], 0, os.SEEK_CUR) > 0

    def _open_files(self) -> None:
        files, output = self.files, self.limits.output_kb << 10
        files["stdin"] = sealed_input(self.stdin)
        files["stdout"] = bounded_output(output)
        files["stderr"] = bounded_output(output)
        files["input"] = sealed_input(marshal.dumps(self.payload))
        files["results"] = bounded_output(self.limits.result_kb << 10)
        if self.judge is not None:
            ends = socket.socketpair()
            files["program's wire"], files["judge's wire"] = (end.detach() for end in ends)
            files["tests"] = sealed_input(marshal.dumps(self.judge))
            files["nothing"] = os.open(os.devnull, os.O_RDWR)
            files["own results"] = bounded_output(OWN_RESULTS_BYTES)

    def _close(self, *names: str) -> None:
        for name in names:
            if name in self.files:
                os.close(self.files.pop(name))

    def _remains(self, reply: dict[str, Any], oom: bool) -> Remains:
        if "fault" in reply:
            return Remains(fault=reply["fault"])
        program = reply["children"][0]
        fault = None if oom else next((child["fault"] for child in reply["children"] if child["fault"]), None)
        return Remains(
            status=program["status"],
            why=next((child["why"] for child in reply["children"] if child["why"] in ("cpu", "wall")), None),
            fault=fault,
            cpu=program["cpu"],
            wall=reply["wall"],
            max_rss_kb=program["max_rss_kb"],
            oom=oom,
            **read_printed(self.files["stdout"], self.files["stderr"]),
            lines=verdict.parse_lines(read_output(self.files["results"])[0], self.most_lines),
        )


def sealed_input(data: bytes) -> int:
    """A read-only file with the data."""
    descriptor = os.memfd_create("input", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def bounded_output(size: int) -> int:
    """An empty file that takes a little over `size` bytes and no more."""
    descriptor = os.memfd_create("output", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size + SLACK)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return descriptor


def read_output(descriptor: int) -> tuple[bytes, bool]:
    """What a run wrote, and whether it wrote more than it may."""
    size = os.fstat(descriptor).st_size - SLACK
    end = os.lseek(descriptor, 0, os.SEEK_CUR)
    return os.pread(descriptor, min(end, size), 0) if end else b"", end > size


def read_printed(stdout: int, stderr: int) -> dict[str, Any]:
    """What a run printed, in the fields of `Remains`."""
    (out, out_cut), (err, err_cut) = read_output(stdout), read_output(stderr)
    return {"stdout": out, "stdout_cut": out_cut, "stderr": err, "stderr_cut": err_cut}
