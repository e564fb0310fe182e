"""Kernel calls that the standard library does not offer, through ctypes."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Callable
from typing import Any

from upshot.sandbox.inside.syscall_table import numbers

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
CLONE_THREAD = 0x00010000
CLONE_CHILD_CLEARTID = 0x00200000
CLONE_CHILD_SETTID = 0x01000000
SIGCHLD = 17

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 32, 4096, 16384, 1 << 18
MNT_DETACH = 2

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, PR_GET_TID_ADDRESS = 1, 4, 22, 38, 40
PR_SET_CHILD_SUBREAPER = 36

Step = tuple[Callable[..., int], tuple[Any, ...], str]
"""A prepared C call: function, arguments, and its name for errors."""

_libc = ctypes.PyDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_NR = numbers()


def step(name: str, *arguments: object) -> Step:
    """A C call prepared now and made later: (function, arguments, name for errors)."""
    texts = [value.encode() if isinstance(value, str) else value for value in arguments]
    boxed = tuple(ctypes.c_long(value) if isinstance(value, int) else value for value in texts)
    shown = ", ".join(str(value) for value in arguments if isinstance(value, int | str | bytes))
    return getattr(_libc, name), boxed, f"{name}({shown})"


def syscall_step(name: str, *arguments: object) -> Step:
    """A system call prepared now and made later."""
    function, boxed, _ = step("syscall", _NR[name], *arguments)
    return function, boxed, name


def perform(step: Step) -> int:
    """Make a prepared call; raises OSError that names it."""
    function, arguments, name = step
    value = function(*arguments)
    if value < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return int(value)


def call(name: str, *arguments: object) -> int:
    """Make a C call; raises OSError."""
    return perform(step(name, *arguments))


def syscall(name: str, *arguments: object) -> int:
    """Make one system call by name; raises OSError."""
    return perform(syscall_step(name, *arguments))


def prctl(option: int, argument: object = 0) -> int:
    """prctl(2); raises OSError."""
    return call("prctl", option, argument, 0, 0, 0)


def set_mount_flags(path: str, flags: int) -> None:
    """Add flags (MS_RDONLY, MS_NOSUID and MS_NODEV have the same values here) to a mount and all mounts under it."""
    attributes = (ctypes.c_uint64 * 4)(flags)  # to set, to clear, propagation, user namespace
    at_fdcwd, at_recursive = -100, 0x8000
    syscall("mount_setattr", at_fdcwd, path, at_recursive, attributes, ctypes.sizeof(attributes))


def no_capabilities() -> Step:
    """The prepared call that drops every capability."""
    version_and_pid = (ctypes.c_uint32 * 2)(0x20080522, 0)
    return step("capset", version_and_pid, (ctypes.c_uint32 * 6)())  # effective, permitted, inheritable: 64 bits each


def fork_into(flags: int) -> int:
    """Fork this single-threaded process into new namespaces in one system call; 0 in the child.

    os.fork cannot take flags, and unshare(CLONE_NEWPID) works once per process, so it would need a second fork for
    every run. The interpreter's fork hooks are skipped: with one thread there is no lock to repair, and running them
    touches 250 pages (1.6 ms) in every child. The only necessary one, fresh random seeds, is done by the child itself.
    """
    # x86_64 takes (flags, stack, parent_tid, child_tid, tls), aarch64 (flags, stack, parent_tid, tls, child_tid).
    thread_id = _thread_id_address()
    tail = (thread_id, 0) if _NR["read"] == 0 else (0, thread_id)
    tid_flags = (CLONE_CHILD_SETTID | CLONE_CHILD_CLEARTID) if thread_id else 0
    return syscall("clone", flags | tid_flags | SIGCHLD, 0, 0, *tail)


@functools.cache
def _thread_id_address() -> int:
    """The address at which the C library keeps the main thread's id; 0 if the kernel does not report it."""
    address = ctypes.c_void_p(0)
    with contextlib.suppress(OSError):
        prctl(PR_GET_TID_ADDRESS, ctypes.byref(address))
    return address.value or 0
