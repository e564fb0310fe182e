"""Confinement of one run: every layer, in the order that the kernel requires, before a line of the program is read.

The steps are prepared in the zygote as plain C calls, and the child only makes them: each page of interpreter memory
that the child touches is a page fault, and page faults are most of a run's cost.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import struct
from dataclasses import dataclass
from typing import Any

from upshot.sandbox.inside import kernel, namespaces, seccomp

RLIM_INFINITY = resource.RLIM_INFINITY
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
TRUNCATE, IOCTL_DEV, REFER = 1 << 14, 1 << 15, 1 << 13
READ = EXECUTE | READ_FILE | READ_DIR
ON_FILES = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV
# The number of file access rights each version of the interface knows.
_RIGHTS_OF_ABI = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}


@dataclass(frozen=True)
class Walls:
    """The layers of this machine, decided once by the supervisor and used by every run."""

    namespaces: str | None
    """'root' (real root's namespaces), 'user' (a user namespace) or None."""
    landlock: int
    """The kernel's Landlock version; 0 means none."""
    seccomp: bool
    uid: int | None
    """The user id to drop to; None if this process may not change it."""
    scratch: str
    """The directory for files: /tmp inside namespaces, a directory of the slot outside them."""


class Confinement:
    """How a zygote confines its children: `plan` runs in the zygote, `apply` in the child."""

    def __init__(self, walls: Walls, readable: list[int], writable: list[int]) -> None:
        self.walls = walls
        self.flags = namespaces.RUN_FLAGS if walls.namespaces else 0
        self._last: list[kernel.Step] = []
        if walls.landlock:
            self._last.append(restrict_files(walls.landlock, readable, writable))
        if walls.seccomp and walls.namespaces:
            self._last.append(seccomp.install())
        self._plans: dict[str, list[kernel.Step]] = {}

    def plan(self, limits: dict[str, Any]) -> list[kernel.Step]:
        """The steps for these limits."""
        key = repr(limits)
        if key not in self._plans:
            if len(self._plans) > 64:
                self._plans.clear()
            last = self._last
            if limits.get("native") and self.walls.seccomp:
                last = [*last[:-1], seccomp.install(native=True)]
            self._plans[key] = _plan(self.walls, limits) + last
        return self._plans[key]

    def apply(self, plan: list[kernel.Step]) -> None:
        """Apply every layer to this process; raises OSError if one is refused, and then nothing may run."""
        for step in plan:
            kernel.perform(step)
        if self.walls.seccomp and not self.walls.namespaces:
            # Without a PID namespace the filter must name the only process that may be signalled: the run's own.
            kernel.perform(seccomp.install(os.getpid()))


def _plan(walls: Walls, limits: dict[str, Any]) -> list[kernel.Step]:
    native = bool(limits.get("native"))
    drop = walls.uid if walls.namespaces != "user" else None  # with a user namespace the zygote has dropped already
    uid, gid = (drop, drop) if drop is not None else (os.getuid(), os.getgid())
    # A new process group, so that signals to the group do not reach the zygote and its other runs. Not a session:
    # the kernel schedules sessions against each other, whatever the niceness of their processes.
    steps: list[kernel.Step] = [kernel.step("setpgid", 0, 0), kernel.step("prctl", kernel.PR_SET_PDEATHSIG, 9, 0, 0, 0)]
    if walls.namespaces:
        steps += namespaces.private_tmp(limits["disk_mb"], limits["files"], uid, gid)
        if native or limits.get("proc"):
            steps.append(namespaces.private_proc())
    steps.append(kernel.step("chdir", walls.scratch))
    steps += _limit(limits, native, own_user=walls.namespaces == "user" or walls.uid is not None)
    if drop is not None:
        steps.append(kernel.step("setgroups", 0, None))
        steps.append(kernel.step("setresgid", gid, gid, gid))
        steps.append(kernel.step("setresuid", uid, uid, uid))
    steps.append(kernel.no_capabilities())
    # A change of user clears the death signal, so it is set again.
    steps.append(kernel.step("prctl", kernel.PR_SET_PDEATHSIG, 9, 0, 0, 0))
    steps.append(kernel.step("prctl", kernel.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    return steps


def _limit(limits: dict[str, Any], native: bool, own_user: bool) -> list[kernel.Step]:
    memory = limits["memory_mb"] << 20
    # Virtual machines of other languages reserve far more address space than they use; their data is what counts.
    space = RLIM_INFINITY if native else memory + limits["base_bytes"]
    # The kernel counts processes per user (and user namespace): without its own one, a run would be charged for
    # everybody's processes. Then only the control group's count applies.
    processes = limits["processes"] if own_user else RLIM_INFINITY
    bounds = (
        (resource.RLIMIT_CPU, int(limits["cpu_seconds"]) + 2),
        (resource.RLIMIT_AS, space),
        (resource.RLIMIT_DATA, memory if native else RLIM_INFINITY),
        (resource.RLIMIT_FSIZE, limits["file_mb"] << 20),
        (resource.RLIMIT_NOFILE, limits["open_files"]),
        (resource.RLIMIT_NPROC, processes),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    )
    pair = ctypes.c_uint64 * 2
    return [kernel.step("setrlimit", what, pair(most, most)) for what, most in bounds if most != RLIM_INFINITY]


def landlock_version() -> int:
    """The kernel's Landlock version, 0 where there is none."""
    with contextlib.suppress(OSError):
        return kernel.syscall("landlock_create_ruleset", 0, 0, 1)
    return 0


def restrict_files(version: int, readable: list[int], writable: list[int]) -> kernel.Step:
    """The prepared restriction of a process to the trees behind these descriptors; no TCP, no signals to the outside.

    The ruleset is made once, in the zygote; a child only enters it.
    """
    rights = (1 << _RIGHTS_OF_ABI[min(version, 5)]) - 1  # all rights that this version can forbid
    # Rights on files, on the network from version 4 on, and beyond the process from version 6 on.
    attributes = [rights, *[0b11] * ((version >= 4) + (version >= 6))]
    handled = struct.pack(f"={len(attributes)}Q", *attributes)
    ruleset = kernel.syscall("landlock_create_ruleset", handled, len(handled), 0)
    allowed = [(descriptor, READ) for descriptor in readable] + [(descriptor, ~IOCTL_DEV) for descriptor in writable]
    for descriptor, wanted in allowed:
        granted = wanted & rights
        if os.fstat(descriptor).st_mode & 0o170000 != 0o040000:
            granted &= ON_FILES
        kernel.syscall("landlock_add_rule", ruleset, 1, struct.pack("=Qi", granted, descriptor), 0)
    return kernel.syscall_step("landlock_restrict_self", ruleset, 0)
