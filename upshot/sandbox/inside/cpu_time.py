"""CPU time of a run: of its first process and of everything that this process started."""

from __future__ import annotations

import contextlib
import os
import time

TICK = 1.0 / os.sysconf("SC_CLK_TCK")


def open_proc() -> int:
    """A descriptor of /proc, for `of_family`; it outlives a change of the root directory."""
    return os.open("/proc", os.O_PATH | os.O_CLOEXEC)


def of_process(pid: int) -> float:
    """Seconds of one process, all its threads together; raises OSError if it is gone."""
    return time.clock_gettime(((~pid) << 3) | 2)  # the clock id of a process's CPU time


def spent_waiting(proc: int, pid: int) -> float:
    """Seconds that a process was ready to run while others had the processor; 0 if the kernel does not report it."""
    fields = _read(proc, f"{pid}/schedstat").split()
    return int(fields[1]) * 1e-9 if len(fields) > 1 else 0.0


def of_family(proc: int, pid: int) -> float:
    """Seconds of a process and of all its descendants, including ended ones; OSError if it is gone.

    Not counted: children that were reaped unseen because their parent ignores SIGCHLD. The wall cap bounds those.
    """
    total = of_process(pid) + _of_the_dead(proc, pid)
    todo = _children(proc, pid)
    while todo:
        one = todo.pop()
        with contextlib.suppress(OSError):  # it ended meanwhile; its time is, or will be, in its parent's
            total += of_process(one) + _of_the_dead(proc, one)
            todo += _children(proc, one)
    return total


def _of_the_dead(proc: int, pid: int) -> float:
    """Seconds of the children that a process has waited for."""
    fields = _read(proc, f"{pid}/stat").rpartition(b")")[2].split()
    return (int(fields[13]) + int(fields[14])) * TICK if len(fields) > 14 else 0.0


def _children(proc: int, pid: int) -> list[int]:
    """The children of every thread of a process; none if the kernel does not report them."""
    threads: list[str] = []
    with contextlib.suppress(OSError):
        directory = os.open(f"{pid}/task", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=proc)
        try:
            threads = os.listdir(directory)
        finally:
            os.close(directory)
    return [int(word) for thread in threads for word in _read(proc, f"{pid}/task/{thread}/children").split()]


def _read(proc: int, path: str) -> bytes:
    def open_below(name: str, flags: int) -> int:
        return os.open(name, flags, dir_fd=proc)

    with contextlib.suppress(OSError), open(path, "rb", buffering=0, opener=open_below) as file:
        return file.read()
    return b""


def count_oom_kills(proc: int) -> int:
    """How many processes the kernel has killed because memory ran out, on the whole machine."""
    lines = _read(proc, "vmstat").splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith(b"oom_kill ")), 0)
