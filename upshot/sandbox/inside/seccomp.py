"""The system call filter: an allow-list compiled to a search tree of classic BPF, for x86_64 and aarch64.

It is a tree instead of a chain, because the kernel runs the filter once for each of its system calls when it is
installed, which happens in every run.
"""

from __future__ import annotations

import ctypes
import struct

from upshot.sandbox.inside import kernel
from upshot.sandbox.inside.syscall_table import ALLOWED, AUDIT_ARCH, FATAL, MACHINE, numbers

LOAD, JEQ, JGE, JSET, AND, JA, RET = 0x20, 0x15, 0x35, 0x45, 0x54, 0x05, 0x06
RET_KILL, RET_ERRNO, RET_ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
EPERM, ENOSYS, EACCES = 1, 38, 13
NAMESPACE_FLAGS = 0x7E020000
OFFSET_NR, OFFSET_ARCH = 0, 4
OFFSET_ARG0, OFFSET_ARG1, OFFSET_ARG2, OFFSET_ARG3, OFFSET_ARG4, OFFSET_ARG5 = 16, 24, 32, 40, 48, 56
MADV_COLD = 20
"""The first value of the advice that drops pages of a file from memory."""
AF_UNIX = 1
SO_SNDBUF, F_SETPIPE_SZ = 7, 1031
O_ACCMODE, O_TRUNC = 3, 0x200
RLIMIT_CPU = 0
# Options of prctl that a program or its C library may use: names, timers, dumpable flag, bounding set, memory names.
# Not PR_SET_PDEATHSIG (1): a run must end with its zygote.
PRCTL_OPTIONS = (2, 3, 4, 15, 16, 23, 29, 30, 39, 0x53564D41)
# Without a PID namespace a file's owner (F_SETOWN, F_SETOWN_EX, F_SETSIG, FIOSETOWN, SIOCSPGRP) may be anybody's
# process, and the kernel would send it any signal. So: copies, flags and seals only, …
FCNTL_COMMANDS = (0, 1, 2, 3, 4, 9, 1030, 1032, 1033, 1034)
# … and of ioctl: is it a terminal (two forms), its size, how much to read, close-on-exec, non-blocking.
IOCTL_COMMANDS = (0x5401, 0x802C542A, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
# F_GETLK, F_SETLK, F_SETLKW, the same of open files, leases and notifications.
LOCKS = (5, 6, 7, 36, 37, 38, 1024, 1025, 1026)
# Landlock controls none of these (truncate from ABI 3 on): without its own mounts, a run could change rights and times
# of every file of its user, or empty it.
UNWATCHED = ("chmod", "fchmod", "fchmodat", "utime", "utimes", "futimesat", "utimensat", "truncate")

Instruction = tuple[int, int, int, int]


def build(own_pid: int | None = None, machine: str = MACHINE, native: bool = False) -> bytes:
    """The filter's instructions, ready for the kernel. `native`: for tool chains, whose runs hold no secret.

    `own_pid` replaces PID and mount namespaces: no new processes (nothing would end them with the run), signals and the
    like only to this process, the run's own, and no changes of the rights and times of files.
    """
    table = numbers(machine)
    blocks = {"clone3": [_ret(RET_ERRNO | ENOSYS)]}
    blocks |= {name: [_ret(RET_ALLOW)] for name in ALLOWED}
    blocks |= {name: [_ret(RET_KILL)] for name in FATAL}
    blocks |= _guard(own_pid) | _hide_page_cache(native)
    by_number = {table[name]: code for name, code in blocks.items() if name in table}
    default = [_ret(RET_ERRNO | EPERM)]
    # Above the table: calls newer than this file. ENOSYS lets the C library fall back.
    tree = _tree(_intervals(by_number, default, [_ret(RET_ERRNO | ENOSYS)]))
    head = [(LOAD, 0, 0, OFFSET_ARCH), (JEQ, 1, 0, AUDIT_ARCH[machine]), _ret(RET_KILL), (LOAD, 0, 0, OFFSET_NR)]
    if machine == "x86_64":
        head += [(JGE, 0, 1, 0x40000000), _ret(RET_KILL)]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in head + tree)


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


def install(own_pid: int | None = None, native: bool = False) -> kernel.Step:
    """The prepared, permanent installation of a filter in this process, after no_new_privs."""
    program = build(own_pid, native=native)
    buffer = ctypes.cast(ctypes.create_string_buffer(program, len(program)), ctypes.c_void_p)
    described = ctypes.pointer(_Program(len(program) // 8, buffer))
    return kernel.step("prctl", kernel.PR_SET_SECCOMP, 2, described, 0, 0)


def _ret(value: int) -> Instruction:
    return (RET, 0, 0, value)


def _guard(own_pid: int | None) -> dict[str, list[Instruction]]:
    """Blocks for the calls whose arguments decide; calls not listed here are refused."""
    allow, deny = _ret(RET_ALLOW), _ret(RET_ERRNO | EPERM)
    arg0 = (LOAD, 0, 0, OFFSET_ARG0)
    alone = own_pid is not None
    blocks: dict[str, list[Instruction]] = {}
    clone = [arg0, (JSET, 0, 1, NAMESPACE_FLAGS), _ret(RET_KILL)]
    blocks["clone"] = [*clone, *([(JSET, 1, 0, kernel.CLONE_THREAD), deny] if alone else []), allow]
    if not alone:
        blocks |= {name: [allow] for name in ("fork", "vfork", "execve", "execveat")}
    blocks["socketpair"] = [arg0, (JEQ, 1, 0, AF_UNIX), _ret(RET_ERRNO | EACCES), allow]
    blocks["prctl"] = _one_of(OFFSET_ARG0, PRCTL_OPTIONS)
    # Bytes in transit are in the kernel's memory, which no rlimit counts, so sockets and pipes keep their initial size.
    # A kernel may also silently give a smaller buffer than requested.
    blocks["setsockopt"] = [(LOAD, 0, 0, OFFSET_ARG2), (JEQ, 0, 1, SO_SNDBUF), _ret(RET_ERRNO), allow]
    blocks["fcntl"] = [(LOAD, 0, 0, OFFSET_ARG1), *_accept_idly(*LOCKS), (JEQ, 0, 1, F_SETPIPE_SZ), deny, allow]
    blocks["flock"] = [_ret(RET_ERRNO)]
    blocks["setpgid"] = _no_joining(others=not alone)
    # At the end of its CPU time the kernel sends SIGKILL, as the host would. A program that sets that limit could make
    # its own failure look like the host's, so only reading it (prlimit64 without a new value) is allowed.
    blocks["setrlimit"] = [arg0, (JEQ, 0, 1, RLIMIT_CPU), deny, allow]
    reads = _without(OFFSET_ARG2, OFFSET_ARG2 + 4)
    blocks["prlimit64"] = [(LOAD, 0, 0, OFFSET_ARG1), (JEQ, 1, 0, RLIMIT_CPU), allow, *reads]
    signal_block = [allow] if own_pid is None else [arg0, (JEQ, 1, 0, own_pid), deny, allow]
    blocks |= dict.fromkeys(("kill", "tkill", "tgkill", "rt_sigqueueinfo"), signal_block)
    if own_pid is not None:
        # Without a PID namespace these reach other processes of the same user.
        on_itself = [arg0, (JEQ, 2, 0, 0), (JEQ, 1, 0, own_pid), deny, allow]
        blocks |= {"prlimit64": on_itself, "sched_setaffinity": on_itself, "setpriority": [deny]}
        blocks |= {name: [deny] for name in UNWATCHED}
        blocks |= {"open": _no_emptying(OFFSET_ARG1), "openat": _no_emptying(OFFSET_ARG2)}
        known = _one_of(OFFSET_ARG1, FCNTL_COMMANDS)
        blocks["fcntl"] = [known[0], *_accept_idly(*LOCKS), *known[1:]]
        blocks["ioctl"] = _one_of(OFFSET_ARG1, IOCTL_COMMANDS)
    return blocks


def _hide_page_cache(native: bool) -> dict[str, list[Instruction]]:
    """Blocks for the calls that show which pages of a file are in memory, or that load or drop them.

    All runs see the same libraries. Which pages one run has read, another could find out without a clock, and so carry
    the bits of an expected value from the plain look to the judged one. Advice is accepted and ignored.
    """
    none, allow = [_ret(RET_ERRNO)], _ret(RET_ALLOW)
    blocks = {"fadvise64": none, "readahead": none, "mincore": [_ret(RET_ERRNO | EPERM)]}
    blocks |= {name: _without(OFFSET_ARG5) for name in ("preadv2", "pwritev2", "splice")}
    blocks["get_mempolicy"] = _without(OFFSET_ARG4)
    blocks["madvise"] = [(LOAD, 0, 0, OFFSET_ARG2), *_accept_idly(MADV_COLD, MADV_COLD + 1), allow]
    # A page that had to be read is a major fault, which the usage of a process or of its children counts.
    blocks["wait4"] = [allow] if native else _without(OFFSET_ARG3, OFFSET_ARG3 + 4)
    blocks["waitid"] = [allow] if native else _without(OFFSET_ARG4, OFFSET_ARG4 + 4)
    blocks["getrusage"] = [allow] if native else [_ret(RET_ERRNO | EPERM)]
    return blocks


def _without(*words: int) -> list[Instruction]:
    """Allow a call whose argument in these words is 0."""
    checks = [part for word in words for part in ((LOAD, 0, 0, word), (JEQ, 1, 0, 0), _ret(RET_ERRNO | EPERM))]
    return [*checks, _ret(RET_ALLOW)]


def _accept_idly(*values: int) -> list[Instruction]:
    """Report success for these values of the argument, and do nothing.

    Locks and leases of files are treated in this way: all runs see the same libraries, so a lock on one of their files
    would be visible to every other run. Nobody else has a run's own files.
    """
    return [part for value in values for part in ((JEQ, 0, 1, value), _ret(RET_ERRNO))]


def _one_of(argument: int, values: tuple[int, ...]) -> list[Instruction]:
    """Allow a call if an argument is one of these."""
    tests = [(JEQ, len(values) - index, 0, value) for index, value in enumerate(values)]
    return [(LOAD, 0, 0, argument), *tests, _ret(RET_ERRNO | EPERM), _ret(RET_ALLOW)]


def _no_joining(others: bool) -> list[Instruction]:
    """Allow a process to lead its own group, and to put `others` into groups, but not to join another's group itself.

    The first process of a PID namespace (number 1) in a group its child has led could never be ended: the kernel waits
    until the child's number is free, and the group keeps it.
    """
    deny, allow = _ret(RET_ERRNO | EPERM), _ret(RET_ALLOW)
    whom = [(LOAD, 0, 0, OFFSET_ARG0), (JEQ, 2, 0, 0), (JEQ, 3, 0, 1), allow if others else deny]
    return [*whom, (LOAD, 0, 0, OFFSET_ARG1), (JEQ, 1, 0, 0), deny, allow]


def _no_emptying(flags: int) -> list[Instruction]:
    """Allow to open a file, but not to empty one opened for reading only, which Landlock allows before ABI 3."""
    deny, allow = _ret(RET_ERRNO | EPERM), _ret(RET_ALLOW)
    return [(LOAD, 0, 0, flags), (JSET, 0, 2, O_TRUNC), (JSET, 1, 0, O_ACCMODE), deny, allow]


def _intervals(
    blocks: dict[int, list[Instruction]], default: list[Instruction], beyond: list[Instruction]
) -> list[tuple[int, list[Instruction]]]:
    """(first number, action from there on), with equal neighbours merged."""
    intervals: list[tuple[int, list[Instruction]]] = []
    for number in range(max(blocks) + 1):
        action = blocks.get(number, default)
        if not intervals or intervals[-1][1] != action:
            intervals.append((number, action))
    return [*intervals, (max(blocks) + 1, beyond)]


def _tree(intervals: list[tuple[int, list[Instruction]]]) -> list[Instruction]:
    """A binary search over the intervals; a far jump is used if a near one does not reach the other half."""
    if len(intervals) == 1:
        return intervals[0][1]
    middle = len(intervals) // 2
    lower, upper = _tree(intervals[:middle]), _tree(intervals[middle:])
    split = intervals[middle][0]
    if len(lower) <= 255:
        return [(JGE, len(lower), 0, split), *lower, *upper]
    return [(JGE, 0, 1, split), (JA, 0, 0, len(lower)), *lower, *upper]
