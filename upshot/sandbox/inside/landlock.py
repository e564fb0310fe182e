"""Landlock: a list of paths a process may still touch, kept by the kernel whatever its user id."""

from __future__ import annotations

import ctypes
import os

from upshot.sandbox.inside import kernel

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
TRUNCATE, IOCTL_DEV, REFER = 1 << 14, 1 << 15, 1 << 13
READ = EXECUTE | READ_FILE | READ_DIR
ON_FILES = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV
# The number of file access rights each version of the interface knows.
_RIGHTS_OF_ABI = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}


class _Ruleset(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("handled_fs", "handled_net", "scoped")]


class _PathRule(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32)]


def abi() -> int:
    """The kernel's Landlock version, 0 where there is none."""
    try:
        return kernel.syscall("landlock_create_ruleset", 0, 0, 1)
    except OSError:
        return 0


def prepare(version: int, readable: list[int], writable: list[int]) -> kernel.Step:
    """The prepared restriction of a process to the trees behind these descriptors; no TCP, no signals out.

    The ruleset is made once, in the zygote: a child only enters it.
    """
    rights = (1 << _RIGHTS_OF_ABI[min(version, 5)]) - 1  # every one that this version can forbid
    attributes = _Ruleset(rights, 0b11 if version >= 4 else 0, 0b11 if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    ruleset = kernel.syscall("landlock_create_ruleset", ctypes.byref(attributes), size, 0)
    allowed = [(descriptor, READ) for descriptor in readable] + [(descriptor, ~IOCTL_DEV) for descriptor in writable]
    for descriptor, wanted in allowed:
        granted = wanted & rights
        if os.fstat(descriptor).st_mode & 0o170000 != 0o040000:
            granted &= ON_FILES
        kernel.syscall("landlock_add_rule", ruleset, 1, ctypes.byref(_PathRule(granted, descriptor)), 0)
    return kernel.syscall_step("landlock_restrict_self", ruleset, 0)
