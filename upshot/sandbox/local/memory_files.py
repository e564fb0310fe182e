"""Anonymous files in memory: how input reaches a run and how its output comes back."""

from __future__ import annotations

import fcntl
import os

SLACK = 8192
"""Room behind the limit: the kernel refuses a write that would cross the end by whole pages."""


def sealed_input(data: bytes) -> int:
    """A read-only file with the data."""
    descriptor = os.memfd_create("input", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def bounded_output(size: int) -> int:
    """An empty file that takes a little over `size` bytes and no more."""
    descriptor = os.memfd_create("output", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size + SLACK)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return descriptor


def written(descriptor: int) -> tuple[bytes, bool]:
    """What a run wrote, and whether it wrote more than it may."""
    size = os.fstat(descriptor).st_size - SLACK
    end = os.lseek(descriptor, 0, os.SEEK_CUR)
    return os.pread(descriptor, min(end, size), 0) if end else b"", end > size
