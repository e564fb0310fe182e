"""Child processes that end with us, together with the processes that they have started.

PR_SET_PDEATHSIG (`die_with_parent`) ends a child with its parent, but not the child's own children (such as vLLM's
engine processes). So a small process, the `Reaper`, is sent every process group over a pipe, and ends those that are
left when the pipe closes. A process that starts its own session escapes it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

PR_SET_PDEATHSIG = 1


class Reaper:
    """A forked process that outlives us by a moment. Create it before the process has threads."""

    def __init__(self) -> None:
        reading, self._pipe = os.pipe()  # neither end is inherited by the programs that we execute
        self._pid = os.fork()
        if self._pid == 0:
            try:
                os.close(self._pipe)
                _wait_and_reap(reading)
            finally:
                os._exit(0)
        os.close(reading)

    def watch(self, group: int) -> None:
        """Add a process group, which must not outlive us."""
        os.write(self._pipe, f"+{group}\n".encode())

    def forget(self, group: int) -> None:
        """Remove a process group that has ended."""
        os.write(self._pipe, f"-{group}\n".encode())

    def close(self) -> None:
        """End the reaper: nothing is left to watch."""
        os.close(self._pipe)
        os.waitpid(self._pid, 0)


def _wait_and_reap(pipe: int) -> None:
    os.setsid()  # a Ctrl-C or a closed terminal must not end it
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    with os.fdopen(pipe) as lines:
        for line in lines:
            (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    for group in groups:
        end_session(group)


def end_group(group: int) -> None:
    """Send SIGKILL to what is left of a process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def end_session(leader: int) -> None:
    """Send SIGKILL to what is left of a session, in all its process groups; on Linux they are found in /proc."""
    end_group(leader)
    for pid in session_members(leader):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def session_members(session: int) -> list[int]:
    """The living processes of a session; none if there is no /proc."""
    entries = os.listdir("/proc") if os.path.isdir("/proc") else []
    return [pid for pid in map(int, filter(str.isdigit, entries)) if _lives_in(session, pid)]


def _lives_in(session: int, pid: int) -> bool:
    """Whether a process lives in a session. Asking the kernel first saves seconds when hundreds of programs end."""
    with contextlib.suppress(OSError):
        return os.getsid(pid) == session and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def parent_death_hook() -> Callable[[], None] | None:
    """A `preexec_fn`: a child calls it before it executes its program, so that the kernel ends it with us."""
    if sys.platform != "linux":
        return None
    libc, parent = ctypes.CDLL(None), os.getpid()  # looked up before the fork
    return lambda: _die_with(parent, libc)


def die_with_parent() -> None:
    """Let the kernel end this process with the one that started it; for a child that has just started. Linux only."""
    if sys.platform == "linux":
        _die_with(None, ctypes.CDLL(None))


def _die_with(parent: int | None, libc: ctypes.CDLL) -> None:
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    gone = os.getppid() == 1 if parent is None else os.getppid() != parent
    if gone:  # the parent ended before the call, so there will be no signal
        os._exit(1)
