"""One run's message and memory files: sent to a zygote, collected when it is over."""

from __future__ import annotations

import marshal
import os
import signal
import socket
from typing import Any

from upshot.sandbox import verdict
from upshot.sandbox.cgroup import SlotGroup
from upshot.sandbox.limits import Limits
from upshot.sandbox.memory_files import bounded_output, sealed_input, written
from upshot.sandbox.verdict import Remains
from upshot.sandbox.zygotes import Zygote

PATIENCE = 10.0
"""Seconds beyond the wall cap before a silent zygote is given up."""
WIRE_ENDS = slice(5, 7)
CGROUP_SLACK_MB = 64
"""Room in the slot's group for the zygote and the kernel's own pages."""


class Run:
    """One request's memory files and message."""

    def __init__(
        self,
        mode: str,
        payload: dict[str, Any],
        stdin: bytes,
        limits: Limits,
        judge: dict[str, Any] | None,
        native_wall: float | None,
    ) -> None:
        self.limits = limits
        output = limits.output_kb << 10
        self.files = [sealed_input(stdin), bounded_output(output), bounded_output(output)]
        self.files += [sealed_input(marshal.dumps(payload)), bounded_output(limits.result_kb << 10)]
        environment = payload.get("environment", {})
        roles: list[dict[str, Any]] = [{"mode": mode, "fds": [0, 1, 2, 3, 4], "environment": environment}]
        if judge is not None:
            program_end, judge_end = socket.socketpair()
            self.files += [program_end.detach(), judge_end.detach(), sealed_input(marshal.dumps(judge))]
            self.files += [os.open(os.devnull, os.O_RDWR), bounded_output(4096)]
            roles[0]["fds"] = [0, 1, 2, 3, 9, 5]
            roles.append({"mode": "judge", "fds": [8, 8, 8, 7, 4, 6], "environment": {}})
        tests = judge["tests"] if judge is not None else payload.get("calls", ())
        self.most_lines = len(tests) + len(payload.get("fetch", ())) + 4
        request_limits = limits.as_request()
        if native_wall is not None:
            request_limits |= {"native": True, "wall_seconds": native_wall, "cpu_seconds": native_wall}
        self.wall = float(request_limits["wall_seconds"])
        self.request = {"roles": roles, "limits": request_limits}

    async def on(self, zygote: Zygote, group: SlotGroup | None) -> Remains:
        """Run on a zygote and collect what is left."""
        try:
            if group is not None:
                megabytes = self.limits.memory_mb + self.limits.disk_mb + CGROUP_SLACK_MB
                group.limit(megabytes << 20, self.limits.processes + 8)
            zygote.send(self.request, self.files)
            self._let_go_of_wire()
            reply = await zygote.finish(self.wall + PATIENCE)
            killed = any(child["status"] == signal.SIGKILL and not child["why"] for child in reply.get("children", ()))
            return self._remains(reply, oom=killed and group is not None and group.new_oom_kills())
        finally:
            for descriptor in self.files:
                os.close(descriptor)
            self.files = []

    def _let_go_of_wire(self) -> None:
        """Close our copies of the wire between program and judge, or neither would see the other end."""
        if len(self.files) > WIRE_ENDS.stop:
            for descriptor in self.files[WIRE_ENDS]:
                os.close(descriptor)
            del self.files[WIRE_ENDS]

    def _remains(self, reply: dict[str, Any], oom: bool) -> Remains:
        if "fault" in reply:
            return Remains(fault=reply["fault"])
        program = reply["children"][0]
        fault = next((child["fault"] for child in reply["children"] if child["fault"]), None)
        stdout, stdout_cut = written(self.files[1])
        stderr, stderr_cut = written(self.files[2])
        return Remains(
            status=program["status"],
            why=next((child["why"] for child in reply["children"] if child["why"] in ("cpu", "wall")), None),
            fault=fault,
            cpu=program["cpu"],
            wall=reply["wall"],
            max_rss_kb=program["max_rss_kb"],
            oom=oom,
            stdout=stdout,
            stderr=stderr,
            stdout_cut=stdout_cut,
            stderr_cut=stderr_cut,
            lines=verdict.parse_lines(written(self.files[4])[0], self.most_lines),
        )
