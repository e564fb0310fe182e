"""Programs in other languages: compile and run commands inside the run's own namespaces."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from typing import Any

from upshot.sandbox.inside import cpu_time, kernel, program

COMPILER_OUTPUT = 64 << 10


def run(payload: dict[str, Any], results: program.Results) -> int:
    """Write the source, compile it if need be, run it; this process stays outside the program's reach."""
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    program.write_files(payload.get("files") or {})
    with open(payload["source_name"], "w") as file:
        file.write(payload["program"])
    if payload.get("compile"):
        report = _compile(payload["compile"], payload["compile_seconds"])
        results.put({"compile": report})
        if report["why"] or report["status"]:
            return 0
    report = _step(payload["run"], payload["cpu_seconds"], payload["run_seconds"], None)
    program.fetch_files(payload.get("fetch") or [], results)
    results.put({"run": report})
    return 0


def _compile(command: list[str], seconds: float) -> dict[str, Any]:
    with open(".compiler", "w+b") as output:
        report = _step(command, seconds, seconds, output.fileno())
        output.seek(0)
        report["output"] = output.read(COMPILER_OUTPUT).decode(errors="replace")
    os.unlink(".compiler")
    return report


def _step(command: list[str], cpu: float, wall: float, output: int | None) -> dict[str, Any]:
    """Run one command to its end or its limit."""
    started = time.monotonic()
    proc = cpu_time.open_proc()
    spent = _below_us(proc)
    quiet = subprocess.DEVNULL if output is not None else None
    process = subprocess.Popen(command, stdin=quiet, stdout=output, stderr=output, restore_signals=True)
    why = None
    while process.poll() is None:
        time.sleep(0.005)
        used = _below_us(proc) - spent
        if used >= cpu or time.monotonic() - started >= wall:
            why = "cpu" if used >= cpu else "wall"
            break
    # The whole namespace, not the process alone: what it started must not outlive it. We are its init and exempt.
    if why:
        os.kill(-1, signal.SIGKILL)
    status = process.wait()
    os.close(proc)
    return {"status": status, "why": why, "t": time.monotonic() - started}


def _below_us(proc: int) -> float:
    """CPU seconds of all we started: orphans come to us, who are the namespace's init. Our own do not count."""
    own = cpu_time.of_process(os.getpid())
    return max(0.0, cpu_time.of_family(proc, os.getpid()) - own)
