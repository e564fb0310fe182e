"""One process at a time in a run folder. The lock goes with its process, however that ends.

It is a POSIX record lock and no flock: children that are forked (sandbox, verifiers) do not inherit it, so that none of
them holds the folder of a run that was killed.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from upshot.core.errors import UserError

NAME = "lock"
_held: set[Path] = set()
"""Folders that this process has locked: a process never waits for its own record locks, and closing a second
descriptor would let go of the first one's."""


@contextmanager
def hold(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Hold a run folder; where another run holds it, a `UserError` that names its process and machine."""
    path = (folder / NAME).resolve()
    if path in _held:
        raise UserError(f"run folder '{folder}' is being written by another run in this process ({os.getpid()})")
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        _lock(file, folder, say)
        os.ftruncate(file, 0)
        os.pwrite(file, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
        _held.add(path)
        try:
            yield
        finally:
            _held.discard(path)
    finally:
        os.close(file)


def _lock(file: int, folder: Path, say: Callable[[str], None]) -> None:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            say(f"'{folder}' cannot be locked here ({error.strerror}): see that no second run writes it")
            return
        raise UserError(
            f"run folder '{folder}' is being written by {_holder(file)}; "
            "wait until that run ends, or stop it, before you use the folder"
        ) from error


def _holder(file: int) -> str:
    try:
        who = json.loads(os.pread(file, 1000, 0))
        return f"process {who['pid']} on {who['host']}"
    except (ValueError, KeyError, TypeError):
        return "another process"
