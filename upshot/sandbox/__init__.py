"""Runs untrusted programs: isolation, a pool of warm slots, an HTTP server, clients."""

from __future__ import annotations

import functools
import hashlib
import importlib
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from upshot.sandbox.connection import connect as connect
    from upshot.sandbox.limits import Limits as Limits
    from upshot.sandbox.local.pool import Sandbox as Sandbox
    from upshot.sandbox.local.slots import Busy as Busy
    from upshot.sandbox.outcome import Outcome as Outcome
    from upshot.sandbox.outcome import RunResult as RunResult
    from upshot.sandbox.outcome import StdioTest as StdioTest
    from upshot.sandbox.outcome import TestResult as TestResult
    from upshot.sandbox.runner import CodeRunner as CodeRunner
    from upshot.sandbox.runner import Session as Session

_HOMES = {
    "Busy": "local.slots",
    "CodeRunner": "runner",
    "Limits": "limits",
    "Outcome": "outcome",
    "RunResult": "outcome",
    "Sandbox": "local.pool",
    "Session": "runner",
    "StdioTest": "outcome",
    "TestResult": "outcome",
    "connect": "connection",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, because the zygote and the CLI import this package without any."""
    if name not in _HOMES:
        raise AttributeError(f"module 'upshot.sandbox' has no attribute {name!r}")
    return getattr(importlib.import_module(f"upshot.sandbox.{_HOMES[name]}"), name)


@functools.cache
def version() -> str:
    """A hash of what decides verdicts here: the text of this package, and the Python that runs programs."""
    files = (path for path in Path(__file__).parent.rglob("*") if path.suffix in (".py", ".txt", ".yaml"))
    texts = b"".join(path.read_bytes() for path in sorted(files))
    return hashlib.blake2b(texts + platform.python_version().encode(), digest_size=8).hexdigest()
