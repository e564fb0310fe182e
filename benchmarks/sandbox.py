"""Programs a second: the sandbox over HTTP and in process, beside one bare process per program.

    python benchmarks/sandbox.py [--seconds 8] [--concurrency 32] [--slots 32] [--json FILE]

Three asserts a program, two of them right. `/health` is asked ten times a second throughout; its slowest answer is
printed. The bare runner has the semantics of the widely used code API: one forked process for each program, one at a
time, a shared list for the results, the process killed at the time limit; no isolation. The load generator shares the
machine's cores.
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
    """Keep `concurrency` programs in flight for some seconds; programs finished a second."""
    numbers = itertools.count()
    done = 0
    end = time.perf_counter() + seconds

    async def worker(index: int) -> None:
        nonlocal done
        while time.perf_counter() < end:
            await send(next(numbers))
            done += 1

    started = time.perf_counter()
    await asyncio.gather(*(worker(index) for index in range(concurrency)))
    return done / (time.perf_counter() - started)


class Http:
    """A few raw keep-alive connections: a load generator that costs little beside what it measures."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def ask(self, method: str, path: str, body: bytes = b"") -> dict[str, Any]:
        """One request, one JSON answer."""
        reader, writer = self.idle.pop() if self.idle else await asyncio.open_connection("127.0.0.1", self.port)
        head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
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
    wrong = 0
    waits: list[float] = []

    async def send(number: int) -> None:
        nonlocal wrong
        program, expected, limit = work(number)
        body = json.dumps({"program": program, "tests": TESTS, "max_execution_time": limit}).encode()
        wrong += (await http.ask("POST", "/test_program", body))["results"] != expected

    async def health() -> None:
        while True:
            started = time.perf_counter()
            await pulse.ask("GET", "/health")
            waits.append(1000 * (time.perf_counter() - started))
            await asyncio.sleep(0.1)

    await drive(send, concurrency, 1.0)  # warm every slot
    watch = asyncio.create_task(health())
    before, started = cpu_seconds(pid), time.perf_counter()
    rate = await drive(send, concurrency, seconds)
    programs = rate * (time.perf_counter() - started)
    cpu_ms = 1000 * (cpu_seconds(pid) - before) / programs
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


def bare(name: str, seconds: float) -> float:
    """One forked process per program, one at a time, killed at its limit."""
    work = workload(name)
    context = multiprocessing.get_context("fork")
    with context.Manager() as manager:
        started, done = time.perf_counter(), 0
        while time.perf_counter() - started < seconds:
            program, _, limit = work(done)
            results = manager.list([0] * len(TESTS))
            process = context.Process(target=_bare_child, args=(program, TESTS, results))
            process.start()
            process.join(limit)
            if process.is_alive():
                process.kill()
                process.join()
            list(results)
            done += 1
        return done / (time.perf_counter() - started)


def start_server(slots: int) -> tuple[subprocess.Popen[bytes], int]:
    """`upshot sandbox` on a free port."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    boot = "import sys; from upshot.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", boot, "sandbox", "--port", str(port), "--slots", str(slots)]
    process = subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.DEVNULL)
    for _ in range(300):
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return process, port
        except OSError:
            time.sleep(0.1)
    raise SystemExit("the server did not start")


def print_table(rows: list[dict[str, Any]], concurrency: int, slots: int) -> None:
    """The figures, a line for each workload."""
    cores = len(os.sched_getaffinity(0))
    print(
        f"{platform.machine()}, {cores} cores, load {os.getloadavg()[0]:.1f}, concurrency {concurrency}, slots {slots}"
    )
    print("programs/s      HTTP  in process    bare  HTTP/bare  CPU each  health max  wrong")
    for row in rows:
        inside = f"{row['in_process']:.0f}" if "in_process" in row else "-"
        rates = f"{row['workload']:<12}{row['http']:>8.0f}{inside:>12}{row['bare']:>8.0f}"
        ratio, cpu, health = (
            f"{row['http'] / row['bare']:.1f} x",
            f"{row['cpu_ms']:.1f} ms",
            f"{row['health_ms']:.0f} ms",
        )
        print(f"{rates}{ratio:>11}{cpu:>10}{health:>12}{row['wrong']:>7}")


def main() -> int:
    """Run every workload and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=8.0, help="of each measurement")
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--json", default=None, help="write the figures here too")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    process, port = start_server(args.slots)
    try:
        for name in args.workloads:
            rows.append(asyncio.run(over_http(port, process.pid, name, args.concurrency, args.seconds)))
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    for row in rows:
        row["bare"] = bare(row["workload"], min(args.seconds, 5.0))
        if row["workload"] != "loops 10%":
            row["in_process"], wrong = asyncio.run(
                in_process(row["workload"], args.slots, args.concurrency, args.seconds)
            )
            row["wrong"] += wrong
    print_table(rows, args.concurrency, args.slots)
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1))
    return 1 if any(row["wrong"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
