"""Programs per second: the sandbox over HTTP and in process, compared with one bare process per program.

    python benchmarks/sandbox.py [--seconds 8] [--concurrency 32] [--slots 32] [--json FILE]

Each program has three asserts, two of which are right. `/health` is requested ten times per second throughout; its
slowest answer is printed. The bare runner behaves like the widely used code API: a server that forks one process for
each program, one at a time, with a shared array for the results, and kills it at the time limit, without isolation. The
load generator shares the machine's cores.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import os
import platform
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]
TRIVIAL = "def add(a, b):\n    return a + b\n"
NUMPY = "import numpy as np\ndef add(a, b):\n    return int(np.array([a, b]).sum())\n"
LOOP = "def add(a, b):\n    while True:\n        pass\n"
TESTS = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0", "assert add(0, 0) == 1"]
WORKLOADS = ("trivial", "numpy", "loops 10%")
RIGHT, LATE = [1, 1, 0], [0, 0, 0]
Work = tuple[str, list[int], float]
"""A program, the results it must get, its time limit in seconds."""


def workload(name: str) -> Callable[[int], Work]:
    """The n-th program of a workload."""
    if name == "loops 10%":
        return lambda n: (LOOP, LATE, 1.0) if n % 10 == 3 else (TRIVIAL, RIGHT, 1.0)
    return lambda n: (NUMPY if name == "numpy" else TRIVIAL, RIGHT, 5.0)


async def drive(send: Callable[[int], Awaitable[None]], concurrency: int, seconds: float) -> float:
    """Keep `concurrency` programs in flight for some seconds; programs finished a second, stragglers not counted."""
    numbers = itertools.count()
    done = 0
    end = time.perf_counter() + seconds

    async def worker() -> None:
        nonlocal done
        while time.perf_counter() < end:
            await send(next(numbers))
            done += time.perf_counter() < end

    await asyncio.gather(*(worker() for _ in range(concurrency)))
    return done / seconds


class Http:
    """A few raw keep-alive connections: a load generator that costs little beside what it measures."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def ask(self, method: str, path: str, body: bytes = b"") -> dict[str, Any]:
        """One request, one JSON answer."""
        reader, writer = self.idle.pop() if self.idle else await asyncio.open_connection("127.0.0.1", self.port)
        kind = "Content-Type: application/json"
        head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{kind}\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        answer = await reader.readuntil(b"\r\n\r\n")
        lengths = [line for line in answer.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        content = await reader.readexactly(int(lengths[0].split(b":")[1]))
        self.idle.append((reader, writer))
        if not answer.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"{answer!r} {content!r}")
        return json.loads(content)

    def close(self) -> None:
        """Close the connections."""
        for _, writer in self.idle:
            writer.close()


def cpu_seconds(root: int) -> float:
    """CPU time of a process, those below it and those they have waited for."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            parents[int(entry)] = int(fields[1])
            ticks[int(entry)] = sum(int(field) for field in fields[11:15])
    total = 0
    for pid, used in ticks.items():
        ancestor = pid
        while ancestor in parents and ancestor != root:
            ancestor = parents[ancestor]
        total += used if ancestor == root else 0
    return total / os.sysconf("SC_CLK_TCK")


async def over_http(port: int, pid: int, name: str, concurrency: int, seconds: float) -> dict[str, Any]:
    """Programs a second, CPU of the server for each, the slowest /health, wrong verdicts."""
    http, pulse = Http(port), Http(port)
    work = workload(name)
    wrong = finished = 0
    waits: list[float] = []

    async def send(number: int) -> None:
        nonlocal wrong, finished
        program, expected, limit = work(number)
        body = json.dumps({"program": program, "tests": TESTS, "max_execution_time": limit}).encode()
        wrong += (await http.ask("POST", "/test_program", body))["results"] != expected
        finished += 1

    async def health() -> None:
        while True:
            started = time.perf_counter()
            try:
                await pulse.ask("GET", "/health")
            finally:
                waits.append(1000 * (time.perf_counter() - started))
            await asyncio.sleep(0.1)

    await drive(send, concurrency, 1.0)  # warm every slot
    watch = asyncio.create_task(health())
    before, first = cpu_seconds(pid), finished
    rate = await drive(send, concurrency, seconds)
    cpu_ms = 1000 * (cpu_seconds(pid) - before) / (finished - first)
    watch.cancel()
    await asyncio.gather(watch, return_exceptions=True)
    http.close()
    pulse.close()
    return {"workload": name, "http": rate, "cpu_ms": cpu_ms, "health_ms": max(waits), "wrong": wrong}


async def in_process(name: str, slots: int, concurrency: int, seconds: float) -> tuple[float, int]:
    """(programs a second, wrong verdicts) without HTTP."""
    from upshot.sandbox import Limits, Sandbox

    work = workload(name)
    wrong = 0

    async with Sandbox(slots=slots) as sandbox:

        async def send(number: int) -> None:
            nonlocal wrong
            program, expected, limit = work(number)
            results = await sandbox.test_program(program, TESTS, Limits(cpu_seconds=limit))
            wrong += [result.value for result in results] != expected

        await drive(send, concurrency, 1.0)
        return await drive(send, concurrency, seconds), wrong


def _bare_child(program: str, tests: list[str], results: Any) -> None:
    space: dict[str, Any] = {}
    exec(program, space)
    for index, test in enumerate(tests):
        try:
            exec(test, space)
            results[index] = 1
        except Exception:
            results[index] = 0


def serve_bare(port: int) -> None:
    """The bare runner as a server: one forked process per program, one at a time, killed at its limit."""
    import uvicorn
    from fastapi import Body, FastAPI

    app = FastAPI()
    context = multiprocessing.get_context("fork")

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "healthy"}

    @app.post("/test_program")
    async def test_program(body: dict[str, Any] = Body(...)) -> dict[str, Any]:  # noqa: B008
        results = context.Array("i", len(body["tests"]))
        process = context.Process(target=_bare_child, args=(body["program"], body["tests"], results))
        process.start()
        process.join(body["max_execution_time"])
        if process.is_alive():
            process.kill()
            process.join()
        return {"results": list(results)}

    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning", timeout_keep_alive=300)


def start_server(slots: int | None) -> tuple[subprocess.Popen[bytes], int]:
    """`upshot sandbox` on a free port, or the bare runner where there are no slots."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    boot = "import sys; from upshot.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", boot, "sandbox", "--port", str(port), "--slots", str(slots)]
    if slots is None:
        command = [sys.executable, __file__, "--serve-bare", str(port)]
    process = subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.DEVNULL)
    for _ in range(300):
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return process, port
        except OSError:
            time.sleep(0.1)
    raise SystemExit("the server did not start")


def measure(slots: int | None, workloads: list[str], concurrency: int, seconds: float) -> list[dict[str, Any]]:
    """Every workload against one server."""
    process, port = start_server(slots)
    try:
        return [asyncio.run(over_http(port, process.pid, name, concurrency, seconds)) for name in workloads]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def print_table(rows: list[dict[str, Any]], concurrency: int, slots: int) -> None:
    """The figures, a line for each workload."""
    cores = len(os.sched_getaffinity(0))
    print(
        f"{platform.machine()}, {cores} cores, load {os.getloadavg()[0]:.1f}, concurrency {concurrency}, slots {slots}"
    )
    print("programs/s      HTTP  in process    bare  HTTP/bare  CPU each  health max    bare's  wrong")
    for row in rows:
        inside = f"{row['in_process']:.0f}" if "in_process" in row else "-"
        rates = f"{row['workload']:<12}{row['http']:>8.0f}{inside:>12}{row['bare']:>8.0f}"
        ratio, cpu, health = (
            f"{row['http'] / row['bare']:.1f} x",
            f"{row['cpu_ms']:.1f} ms",
            f"{row['health_ms']:.0f} ms",
        )
        print(f"{rates}{ratio:>11}{cpu:>10}{health:>12}{row['bare_health_ms']:>7.0f} ms{row['wrong']:>7}")


def main() -> int:
    """Run every workload and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=8.0, help="of each measurement")
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--serve-bare", type=int, default=None, metavar="PORT", help="only serve the bare runner")
    parser.add_argument("--json", default=None, help="write the figures here too")
    args = parser.parse_args()
    if args.serve_bare is not None:
        serve_bare(args.serve_bare)
        return 0
    rows = measure(args.slots, args.workloads, args.concurrency, args.seconds)
    for row, bare in zip(rows, measure(None, args.workloads, args.concurrency, min(args.seconds, 5.0)), strict=True):
        row |= {"bare": bare["http"], "bare_health_ms": bare["health_ms"]}
        if row["workload"] != "loops 10%":
            rate, wrong = asyncio.run(in_process(row["workload"], args.slots, args.concurrency, args.seconds))
            row |= {"in_process": rate, "wrong": row["wrong"] + wrong}
    print_table(rows, args.concurrency, args.slots)
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1))
    return 1 if any(row["wrong"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
