"""System calls: the policy's lists (allowed, allowed depending on arguments, fatal) and the calls' numbers.

The lists are in `syscalls.txt`, one call per line.
"""

from __future__ import annotations

import collections
import platform
from pathlib import Path

MACHINE: str = platform.machine()
"""The architecture on which this process runs."""
AUDIT_ARCH: dict[str, int] = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""The kernel's name of each architecture, as a seccomp filter sees it."""
X86_64: dict[str, int] = {}
AARCH64: dict[str, int] = {}


def _read_lists() -> dict[str, set[str]]:
    """The names of the calls by section; their numbers go to the two tables."""
    lists: dict[str, set[str]] = collections.defaultdict(set)
    section = ""
    for line in Path(__file__).with_name("syscalls.txt").read_text().splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif line and not line.startswith("#"):
            name, *numbers = line.split()
            lists[section].add(name)
            for table, number in zip((X86_64, AARCH64), numbers, strict=True):
                if number != "-":
                    table[name] = int(number)
    return lists


_lists = _read_lists()
ALLOWED, GUARDED, FATAL = (frozenset(_lists[section]) for section in ("allowed", "guarded", "fatal"))


def numbers(machine: str = MACHINE) -> dict[str, int]:
    """The system call numbers of an architecture."""
    tables = {"x86_64": X86_64, "aarch64": AARCH64}
    if machine not in tables:
        raise RuntimeError(f"no system call table for {machine!r}: the sandbox runs on x86_64 and aarch64")
    return tables[machine]
