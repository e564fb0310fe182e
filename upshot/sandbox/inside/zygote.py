"""The zygote: a warm Python process behind the walls that forks one confined child for every run.

It never reads a program, an input or an expected value: those are in memory files that it passes on unread, so nothing
of an earlier run is in the memory that a later one inherits. Standard library only, one thread. `local/zygotes.py`
describes the messages on the control socket.

The order of a run: the zygote makes the plan of confinement for the limits (prepared C calls), a pipe, and one clone
into fresh namespaces. The child puts up its walls, then writes "R" into the pipe, and only then reads its program. So
the pipe distinguishes faults from failures: no "R" means that the sandbox failed before the program's first
instruction; after it, the program causes whatever happens, and no program can turn its failure into a fault (a missing
score). If the zygote itself dies, the blank line that a child writes first into its results has the same meaning
(`local/run.py`).

The zygote waits on pidfds, not on signals or process ids, because an id may belong to another process by the time it is
used. It reads the clocks from time to time (`WatchedChild.check`); the kernel's CPU rlimit catches what it misses. The
reason is recorded before a child is killed. A judge is always the last child: when it has finished, nobody waits for
the program.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from typing import Any

from upshot.sandbox.inside import child, confine, cpu_time, kernel, namespaces

HEADER_BYTES = 65536
MAX_FDS = 16
RENICE_AFTER = 0.2
"""Seconds of CPU after which a run gets a lower priority, so that short programs do not wait behind loops."""
LOOKS = 20
"""A run's CPU clock is read at most this often before its CPU limit is reached."""


class ZygoteProcess:
    """One slot's process: takes a request from the control socket, forks, watches, answers."""

    def __init__(self, control: socket.socket, spec: dict[str, Any]) -> None:
        while os.open(os.devnull, os.O_RDWR) < MAX_FDS - 1:
            pass  # 0 to 15 stay in use, so that a run's files never arrive on a number to which another must move
        self.control = socket.socket(fileno=fcntl.fcntl(control.detach(), fcntl.F_DUPFD_CLOEXEC, MAX_FDS))
        self.walls = confine.Walls(**spec["walls"])
        extra, uid = tuple(spec["extra_paths"]), self.walls.uid
        system = [path for path in namespaces.SYSTEM_FILES if os.path.exists(path)]
        paths = ["/"] if self.walls.namespaces else [*namespaces.visible_paths(extra), *system]
        self.proc = cpu_time.open_proc()
        self.cores = len(os.sched_getaffinity(0))
        self.oom_kills = cpu_time.count_oom_kills(self.proc)
        if self.walls.namespaces:
            namespaces.enter(self.walls.namespaces, spec["workbench"], uid, extra)
        # Inside, /dev holds only the harmless devices; outside, each must be named.
        outside = [self.walls.scratch, *(f"/dev/{name}" for name in namespaces.DEVICES)]
        readable = [os.open(path, os.O_PATH) for path in paths]
        writable = [os.open(path, os.O_PATH) for path in (["/box", "/dev"] if self.walls.namespaces else outside)]
        self.confinement = confine.Confinement(self.walls, readable, writable)
        if not self.walls.namespaces:
            os.environ.update({"HOME": self.walls.scratch, "TMPDIR": self.walls.scratch})
            if uid is not None:
                os.chown(self.walls.scratch, uid, uid)
        os.umask(0o077)

    def serve(self) -> None:
        """Answer requests until the supervisor hangs up."""
        gc.collect()
        gc.freeze()
        self._send({"ready": True})
        while True:
            data, fds, _, _ = socket.recv_fds(self.control, HEADER_BYTES, MAX_FDS)
            if not data:
                os._exit(0)
            self._send(self._run(json.loads(data), fds))
            if not self.walls.namespaces:
                _empty(self.walls.scratch)  # after the answer: a program's files must not turn its run into a fault

    def _send(self, message: dict[str, Any]) -> None:
        self.control.send(json.dumps(message).encode())

    def _run(self, request: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        """Start the request's children (one, or a program and its judge) and wait for all of them."""
        request["limits"]["base_bytes"] = _base_bytes
        plan = self.confinement.plan(request["limits"])
        started = time.monotonic()
        watched: list[WatchedChild] = []
        try:
            # Start the judge first, behind its walls: a running program could take the processes or memory that the
            # judge needs, and an error here is a fault, which no program may cause.
            for role in reversed(request["roles"]):
                for one in watched:
                    one.word = os.read(one.link, 512)
                watched.insert(0, self._start(role, plan, fds))
        except OSError as error:
            for one in watched:
                one.kill("fault")
                one.reap()
            return {"fault": f"fork: {error}"}
        finally:
            # Now and not after the run, because two children that talk must notice each other's end.
            for descriptor in fds:
                os.close(descriptor)
        if request.get("announce"):
            self._send({"pids": [one.pid for one in watched]})
        reports = self._wait(watched, request, started)
        return {"children": reports, "wall": time.monotonic() - started}

    def _start(self, role: dict[str, Any], plan: list[kernel.Step], fds: list[int]) -> WatchedChild:
        ours, theirs = os.pipe()
        pid = kernel.fork_into(self.confinement.flags)
        if pid == 0:
            os.close(ours)
            self._become_child(role, plan, [fds[index] for index in role["fds"]], theirs)
        os.close(theirs)
        return WatchedChild(pid, ours, self)

    def _become_child(self, role: dict[str, Any], plan: list[kernel.Step], fds: list[int], link: int) -> None:
        """In the child: take the descriptors, put up the walls, report it, run. Never returns."""
        try:
            # If memory runs out, the kernel must end the run, not the zygote. If there is no such file (in some
            # containers), the memory limit of the process still holds.
            with contextlib.suppress(OSError):
                os.write(os.open("self/oom_score_adj", os.O_WRONLY, dir_fd=self.proc), b"1000")
            self.confinement.apply(plan)
            os.write(link, b"R")  # fails if the zygote died before the death signal was set
            descriptors = _settle(fds)
        except BaseException as error:
            os.write(link, f"walls: {error!r}".encode()[:500])
            os._exit(1)
        child.main(role, descriptors)
        os._exit(0)

    def _wait(self, watched: list[WatchedChild], request: dict[str, Any], started: float) -> list[dict[str, Any]]:
        limits = request["limits"]
        poller = select.poll()
        poller.register(self.control, select.POLLIN if request.get("announce") else 0)
        by_fd = {one.pidfd: one for one in watched}
        for descriptor in by_fd:
            poller.register(descriptor, select.POLLIN)
        deadline = started + limits["wall_seconds"]
        while by_fd:
            wall = limits["wall_seconds"]  # at most twice as long, because the supervisor does not wait for ever
            timeout = min(one.check(limits["cpu_seconds"], deadline, wall) for one in by_fd.values())
            for descriptor, event in poller.poll(max(1, int(timeout * 1000) + 1)):
                if descriptor not in by_fd:
                    if event & (select.POLLHUP | select.POLLERR):
                        for one in by_fd.values():
                            one.kill("hangup")
                        os._exit(0)
                    self.control.recv(16)
                    for one in by_fd.values():
                        one.kill("ended")
                    continue
                poller.unregister(descriptor)
                ended = by_fd.pop(descriptor)
                ended.reap()
                if ended is watched[-1]:
                    for one in by_fd.values():  # the judge has finished: do not wait for the program
                        one.kill("judged")
        return [one.report(limits["cpu_seconds"]) for one in watched]

    def was_killed_outside(self, status: int, spent: float) -> bool:
        """Whether a SIGKILL that this zygote did not send came from the host.

        In its PID namespace a program is the first process, which its own processes cannot kill. The kernel kills it
        when memory or its CPU limit runs out.
        """
        before, self.oom_kills = self.oom_kills, cpu_time.count_oom_kills(self.proc)
        alone = bool(self.walls.namespaces) and status == signal.SIGKILL and spent < 1
        return alone and self.oom_kills == before


class WatchedChild:
    """One watched child: its clocks, and the reason if it was ended."""

    def __init__(self, pid: int, link: int, zygote: ZygoteProcess) -> None:
        self.pid = pid
        self.link = link
        self.zygote = zygote
        self.pidfd = os.pidfd_open(pid)
        self.looks = 0
        self.cpu = 0.0
        self.why: str | None = None
        self.nice = False
        self.status = 0
        self.usage: resource.struct_rusage | None = None
        self.word = b""

    def check(self, cpu_limit: float, deadline: float, most_extra: float) -> float:
        """End the child if a clock has run out; else return the seconds until the next check."""
        now = time.monotonic()
        try:
            # A run that has just started has no children yet.
            alone, self.looks = self.looks == 0 or not self.zygote.walls.namespaces, self.looks + 1
            spent = cpu_time.of_process(self.pid) if alone else cpu_time.of_family(self.zygote.proc, self.pid)
            self.cpu = max(self.cpu, spent)
        except OSError:
            return 0.001
        if now >= deadline:  # time that a busy machine withheld from the run does not count
            deadline += min(cpu_time.spent_waiting(self.zygote.proc, self.pid), most_extra)
        if self.cpu >= cpu_limit or now >= deadline:
            self.kill("cpu" if self.cpu >= cpu_limit else "wall")
            return 1.0
        if not self.nice and self.cpu >= RENICE_AFTER:
            self.nice = True
            for kind in (os.PRIO_PGRP, os.PRIO_PROCESS):  # a program may have left its group
                with contextlib.suppress(ProcessLookupError):
                    os.setpriority(kind, self.pid, 10)
        left = cpu_limit - self.cpu
        # Several threads or processes use up the rest faster than real time passes.
        soon = min(left, max(left / self.zygote.cores, cpu_limit / LOOKS))
        return min(soon, deadline - now, soon if self.nice else RENICE_AFTER)

    def kill(self, why: str) -> None:
        """End the child and, inside a PID namespace, everything it started."""
        if self.why is None:
            self.why = why
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def reap(self) -> None:
        """Collect the exit status."""
        _, self.status, self.usage = os.wait4(self.pid, 0)

    def report(self, cpu_limit: float) -> dict[str, Any]:
        """The report for the supervisor."""
        assert self.usage is not None
        cpu = max(self.cpu, self.usage.ru_utime + self.usage.ru_stime)
        outside = self.why is None and self.zygote.was_killed_outside(self.status, cpu / cpu_limit)
        word = self.word or os.read(self.link, 512)  # never blocks: the child's end is closed by now
        os.close(self.link)
        os.close(self.pidfd)
        fault = word.decode(errors="replace") or "died before its walls were up"
        return {
            "status": self.status,
            "why": self.why,
            "cpu": cpu,
            "max_rss_kb": self.usage.ru_maxrss,
            "fault": "killed from outside" if outside else None if word == b"R" else fault,
        }


def _empty(directory: str) -> None:
    """Remove the files that a run without a private /tmp left in its scratch directory.

    It uses the system's own tools: a program may leave directories without rights, or deeper than Python recurses.
    """
    if os.listdir(directory):
        for command in (["chmod", "-R", "u+rwx", directory], ["find", directory, "-mindepth", "1", "-delete"]):
            os.waitpid(os.posix_spawnp(command[0], command, os.environ), 0)
    if os.listdir(directory):
        os._exit(1)  # the supervisor starts another zygote; no run may see another's files


_base_bytes = 0
"""Address space of the template, which every run inherits without being charged for it."""


def _settle(fds: list[int]) -> list[int]:
    """Put the run's memory files on descriptors 0, 1, 2, 3 … and close all others."""
    for index, descriptor in enumerate(fds):
        os.dup2(descriptor, index, inheritable=index < 3)
    kernel.perform(_CLOSE_FROM[len(fds)])
    return list(range(len(fds)))


_CLOSE_FROM = [kernel.syscall_step("close_range", first, 0xFFFFFFFF, 0) for first in range(8)]


def template(control: socket.socket, spec: dict[str, Any]) -> None:
    """The tier's template process: imports once, then forks a zygote for every socket that it receives."""
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    # Runs of a killed zygote become our children and are reaped here, not by the machine's first process.
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    poller = select.poll()
    poller.register(control, 0)
    if poller.poll(0):  # the supervisor has hung up already
        os._exit(0)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for name in spec["modules"]:
        with contextlib.suppress(ImportError):
            __import__(name)
    _forget_ourselves()
    global _base_bytes
    with open("/proc/self/statm") as file:
        _base_bytes = int(file.read().split()[0]) * resource.getpagesize()
    control.send(b'{"ready": true}')
    while True:
        data, fds, _, _ = socket.recv_fds(control, HEADER_BYTES, MAX_FDS)
        if not data:
            os._exit(0)
        pid = os.fork()
        if pid == 0:
            control.close()
            _become_zygote(socket.socket(fileno=fds[0]), json.loads(data))
        for descriptor in fds:
            os.close(descriptor)
        control.send(json.dumps({"pid": pid}).encode())


def _become_zygote(control: socket.socket, spec: dict[str, Any]) -> None:
    """In the new zygote: build the walls, serve. Never returns."""
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    spare = control.dup()
    try:
        zygote = ZygoteProcess(control, spec)
    except OSError as error:
        spare.send(json.dumps({"ready": False, "error": str(error)}).encode())
        os._exit(1)
    spare.close()
    zygote.serve()


def _forget_ourselves() -> None:
    """Hide this package from programs: their imports must not find it."""
    for name in [name for name in sys.modules if name == "upshot" or name.startswith("upshot.")]:
        del sys.modules[name]
    sys.path[:] = [path for path in sys.path if path.startswith((sys.prefix, sys.base_prefix))]
    sys.path_hooks[:] = [hook for hook in sys.path_hooks if "editable" not in str(getattr(hook, "__module__", ""))]
    sys.meta_path[:] = [finder for finder in sys.meta_path if "ditable" not in repr(finder)]
    sys.path_importer_cache.clear()
    sys.argv[:] = ["program"]


def main() -> None:
    """Start as a tier's template on the control socket named by the first argument."""
    control = socket.socket(fileno=int(sys.argv[1]))
    spec = json.loads(sys.argv[2])
    plain = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "TMPDIR": "/tmp"}
    os.environ.clear()
    os.environ.update(plain | spec["environment"])
    template(control, spec)
