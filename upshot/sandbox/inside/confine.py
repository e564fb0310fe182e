"""Confinement of one run: every layer in the order the kernel wants them, before a line of the program is read."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from typing import Any

from upshot.sandbox.inside import kernel, landlock, namespaces, seccomp

RLIM_INFINITY = resource.RLIM_INFINITY


@dataclass(frozen=True)
class Walls:
    """The layers of this machine, decided once by the supervisor and kept by every run."""

    namespaces: str | None
    """'root' (real root's namespaces), 'user' (a user namespace) or None."""
    landlock: int
    """The kernel's Landlock version; 0 means none."""
    seccomp: bool
    uid: int | None
    """The user id to drop to; None where this process may not change it."""
    scratch: str
    """The directory for files: /tmp inside namespaces, a directory of the slot outside them."""

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Walls:
        """Read the supervisor's description."""
        names = ("namespaces", "landlock", "seccomp", "uid", "scratch")
        return cls(**{name: data[name] for name in names})


def run_flags(walls: Walls) -> int:
    """The namespaces a run is forked into."""
    return namespaces.RUN_FLAGS if walls.namespaces else 0


def confine(walls: Walls, limits: dict[str, Any], readable: list[int], writable: list[int], native: bool) -> None:
    """Put every layer on this process; raises OSError where one is refused, and then nothing may run."""
    uid = walls.uid if walls.uid is not None else os.getuid()
    if walls.namespaces:
        namespaces.private_tmp(limits["disk_mb"], limits["files"], uid, uid if walls.uid is not None else os.getgid())
        if native:
            namespaces.private_proc()
    else:
        os.chdir(walls.scratch)
    _limit(limits, native, own_user=bool(walls.namespaces) or walls.uid is not None)
    if walls.uid is not None:
        os.setgroups([])
        os.setresgid(walls.uid, walls.uid, walls.uid)
        os.setresuid(walls.uid, walls.uid, walls.uid)
    kernel.drop_capabilities()
    kernel.prctl(kernel.PR_SET_PDEATHSIG, 9)
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    if walls.landlock:
        scratch = os.open(walls.scratch, os.O_PATH | os.O_CLOEXEC)
        landlock.restrict(walls.landlock, readable, [*writable, scratch])
        os.close(scratch)
    if walls.seccomp:
        # The parent's view of this process counts outside a PID namespace, and there the two agree.
        policy = seccomp.Policy() if walls.namespaces else seccomp.Policy(processes=False, signal_pid=os.getpid())
        seccomp.install(_filter(policy))


_filters: dict[seccomp.Policy, bytes] = {}


def _filter(policy: seccomp.Policy) -> bytes:
    if policy not in _filters:
        _filters[policy] = seccomp.build(policy)
    return _filters[policy]


def prepare(walls: Walls) -> None:
    """Build in the zygote what every run would build again."""
    if walls.seccomp and walls.namespaces:
        _filter(seccomp.Policy())


def _limit(limits: dict[str, Any], native: bool, own_user: bool) -> None:
    cpu = int(limits["cpu_seconds"]) + 2
    memory = limits["memory_mb"] << 20
    # Virtual machines of other languages reserve far more address space than they use; their data is what counts.
    space = RLIM_INFINITY if native else memory + limits["base_bytes"]
    # The kernel counts processes per user: without a user of its own the run would be charged for everybody's.
    processes = limits["processes"] if own_user else RLIM_INFINITY
    for what, value in (
        (resource.RLIMIT_CPU, cpu),
        (resource.RLIMIT_AS, space),
        (resource.RLIMIT_DATA, memory if native else RLIM_INFINITY),
        (resource.RLIMIT_FSIZE, limits["file_mb"] << 20),
        (resource.RLIMIT_NOFILE, limits["open_files"]),
        (resource.RLIMIT_NPROC, processes),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        if value != RLIM_INFINITY:
            resource.setrlimit(what, (value, value))
