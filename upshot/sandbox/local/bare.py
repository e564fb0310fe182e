"""The bare runner: one unsandboxed Python process per program. UNSAFE: for programs you wrote, and for comparison.

It has the user's own rights: it reads files, uses the network and can do anything to this account.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import sys
import tempfile
import time
from pathlib import Path

from upshot.core.errors import UserError
from upshot.sandbox.limits import Limits
from upshot.sandbox.local.languages import canonical
from upshot.sandbox.local.script_runner import ScriptRunner
from upshot.sandbox.outcome import Outcome, RunResult
from upshot.sandbox.runner import ProgramJob


class BareRunner(ScriptRunner):
    """One process per program, no isolation at all; only ever used when named."""

    def __init__(self, concurrency: int | None = None, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self._gate = asyncio.Semaphore(concurrency or os.cpu_count() or 1)

    async def _run(self, job: ProgramJob) -> RunResult:
        if canonical(job.language) != "python":
            raise UserError(f"the subprocess runner runs python only, not {job.language!r}; use a sandbox")
        async with self._gate:
            with tempfile.TemporaryDirectory(prefix="upshot-bare-") as folder:
                for name, data in {**job.files, "program.py": job.code.encode()}.items():
                    path = Path(folder, name)
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(data)
                result = await self._process(folder, job.stdin, job.limits)
                found = {name: Path(folder, name).read_bytes() for name in job.fetch if Path(folder, name).is_file()}
        return RunResult(**{**result.__dict__, "files": found})

    async def _process(self, folder: str, stdin: str, limits: Limits) -> RunResult:
        started = time.monotonic()
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "program.py",
            cwd=folder,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        seconds = int(limits.cpu_seconds) + 1
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(process.pid, resource.RLIMIT_CPU, (seconds, seconds))
            memory = (limits.memory_mb + 256) << 20
            resource.prlimit(process.pid, resource.RLIMIT_AS, (memory, memory))
        timed_out = False
        try:
            out, err = await asyncio.wait_for(process.communicate(stdin.encode()), limits.wall)
        except TimeoutError:
            timed_out, out, err = True, b"", b""
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        code = process.returncode
        outcome = (
            Outcome.TIMEOUT if timed_out or code == -signal.SIGXCPU else Outcome.PASSED if code == 0 else Outcome.ERROR
        )
        if outcome is Outcome.ERROR and b"MemoryError" in err[-200:]:
            outcome = Outcome.OUT_OF_MEMORY
        cut = limits.output_kb << 10
        return RunResult(
            outcome,
            code,
            out[:cut].decode(errors="replace"),
            err[:cut].decode(errors="replace"),
            len(out) > cut,
            len(err) > cut,
            time.monotonic() - started,
        )
