"""Programs in other languages: compile and run commands inside the run's own namespaces.

For tests of stdin and stdout, a program is compiled once and run on one input after the other. Its output goes to files
without a name until it has ended, so its next run cannot find it. The expected output is not here.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from typing import Any, BinaryIO

from upshot.sandbox.inside import cpu_time, kernel, program

COMPILER_OUTPUT = 64 << 10


def run(payload: dict[str, Any], results: program.Results) -> int:
    """Write the source, compile it if necessary, and run it; the program cannot reach this process."""
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    program.write_files(payload.get("files", {}))
    with open(payload["source_name"], "w") as file:
        file.write(payload["program"])
    if payload.get("compile"):
        report = _compile(payload["compile"], payload["compile_seconds"])
        results.put({"compile": report})
        if report["why"] or report["status"]:
            return 0
    if "inputs" in payload:
        _run_on_inputs(payload, results)
        return 0
    report = _step(payload["run"], payload["cpu_seconds"], payload["run_seconds"])
    program.fetch_files(payload["fetch"], results)
    results.put({"run": report})
    return 0


def _run_on_inputs(payload: dict[str, Any], results: program.Results) -> None:
    """Run the program on each input, with all output concatenated on ours; a line for each says how long it is."""
    for input_bytes, most in zip(payload["inputs"], payload["most"], strict=True):
        with _nameless() as stdin, _nameless() as stdout, _nameless() as stderr:
            stdin.write(input_bytes)
            stdin.seek(0)
            report = _step(payload["run"], payload["cpu_seconds"], payload["run_seconds"], stdin, stdout, stderr)
            stdout.seek(0)
            text = stdout.read(most + 1)
            stderr.seek(max(0, os.fstat(stderr.fileno()).st_size - program.TAIL_CHARS))
            errors = stderr.read(program.TAIL_CHARS).decode(errors="replace")
        view = memoryview(text[:most])
        while view:
            view = view[os.write(1, view) :]
        results.put({"run": {**report, "size": len(text[:most]), "cut": len(text) > most, "errors": errors}})
        if report["why"]:
            return


def _nameless() -> BinaryIO:
    """A file that no program can find or replace."""
    return os.fdopen(os.open(".", os.O_TMPFILE | os.O_RDWR), "w+b", buffering=0)  # type: ignore[return-value]


def _compile(command: list[str], seconds: float) -> dict[str, Any]:
    with _nameless() as output, open(os.devnull, "rb") as nothing:
        report = _step(command, seconds, seconds, nothing, output, output)
        output.seek(0)
        report["output"] = output.read(COMPILER_OUTPUT).decode(errors="replace")
    return report


def _step(command: list[str], cpu: float, wall: float, *files: BinaryIO) -> dict[str, Any]:
    """Run one command to its end or its limit, with these as its input, output and errors, or with ours."""
    stdin, stdout, stderr = files or (None, None, None)
    started = time.monotonic()
    proc = cpu_time.open_proc()
    spent = _below_us(proc)
    process = subprocess.Popen(command, stdin=stdin, stdout=stdout, stderr=stderr, restore_signals=True)
    why = None
    while process.poll() is None:
        time.sleep(0.005)
        used = _below_us(proc) - spent
        if used >= cpu or time.monotonic() - started >= wall:
            why = "cpu" if used >= cpu else "wall"
            break
    # The whole namespace, not only the process: its children must not outlive it. As the init process, we are exempt.
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    status = process.wait()
    with contextlib.suppress(ChildProcessError):
        while True:  # as the init process, we must reap orphans
            os.waitpid(-1, 0)
    os.close(proc)
    return {"status": status, "why": why, "t": time.monotonic() - started}


def _below_us(proc: int) -> float:
    """CPU seconds of all we started, with orphans, because we are the namespace's init. Our own do not count."""
    return max(0.0, cpu_time.of_family(proc, os.getpid()) - cpu_time.of_process(os.getpid()))
