# ruff: noqa: E501 (the programs are one line each)
"""Processes, descriptors, cgroups and files: nothing outlives its owner, and a lost zygote is replaced."""

from __future__ import annotations

import asyncio
import functools
import gc
import glob
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.patience import until
from tests.sandbox.conftest import soon
from upshot.sandbox import Busy, Limits, Outcome, Sandbox, StdioTest
from upshot.sandbox.local.layers import probe

REPOSITORY = Path(__file__).parents[2]
HONEST = "def add(a, b):\n    return a + b"
PASSED = Outcome.PASSED
SOAK = int(os.environ.get("UPSHOT_SOAK", "400"))
SUPERVISOR = """
import asyncio
import functools
import gc
from upshot.sandbox import Limits, Sandbox

async def main():
    async with Sandbox(slots=3, limits=Limits(cpu_seconds=60)) as box:
        session = await box.session()
        await session.turn("x = 1")
        asyncio.create_task(box.test_program("import os\\nos.fork()\\nwhile True: pass", ["assert f() == 1"]))
        asyncio.create_task(box.test_program("def f(x):\\n    while True: pass", ["x = f(1)"]))
        while box.running < 2:
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.5)
        print("running", flush=True)
        await asyncio.sleep(99)

asyncio.run(main())
"""


def descendants(pid: int) -> set[int]:
    """Every process below one."""
    children: dict[int, list[int]] = {}
    for path in glob.glob("/proc/[0-9]*/stat"):
        try:
            text = Path(path).read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        fields = text.rpartition(")")[2].split()
        children.setdefault(int(fields[1]), []).append(int(text.split()[0]))
    found: set[int] = set()
    todo = [pid]
    while todo:
        for child in children.get(todo.pop(), []):
            found.add(child)
            todo.append(child)
    return found


def alive(pids: set[int]) -> set[int]:
    """Those that are still running."""
    left = set()
    for pid in pids:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                left.add(pid)
        except (FileNotFoundError, ProcessLookupError):
            continue
    return left


def test_no_child_survives_a_killed_supervisor() -> None:
    if not probe().namespaces:
        pytest.skip("the program of this test forks, which only a PID namespace lets it do")
    process = subprocess.Popen([sys.executable, "-c", SUPERVISOR], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)
    assert process.stdout is not None and process.stdout.readline().strip() == "running"
    # A template, zygotes, programs, a judge, a fork, a session.
    assert soon(lambda: len(descendants(process.pid)) >= 7)
    family = descendants(process.pid)
    process.kill()
    process.wait()
    process.stdout.close()
    assert soon(lambda: not alive(family)), alive(family)


def test_leftovers_of_a_killed_supervisor_are_removed_by_the_next() -> None:
    if not probe().namespaces:
        pytest.skip("the program of this test forks, which only a PID namespace lets it do")
    script = SUPERVISOR.replace('print("running"', "print(box._workdir, *box._slots.cgroups.homes.values()")
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)
    assert process.stdout is not None
    left = process.stdout.readline().split()
    assert left and all(os.path.isdir(path) for path in left)
    family = descendants(process.pid)
    process.kill()
    process.wait()
    process.stdout.close()
    assert soon(lambda: not alive(family))

    async def start() -> None:
        async with Sandbox(slots=1):
            pass

    asyncio.run(start())
    assert not [path for path in left if os.path.isdir(path)]


def test_a_killed_zygote_is_replaced_and_its_run_tried_again(box: Any) -> None:
    async def scenario() -> list[Any]:
        await box.sandbox.test_program(HONEST, ["assert add(1, 1) == 2"])
        run = asyncio.create_task(
            box.sandbox.test_program("import time\ntime.sleep(2)\n" + HONEST, ["assert add(1, 1) == 2"])
        )
        await asyncio.sleep(0.2)
        for slot in box.sandbox._slots.all:
            if slot not in box.sandbox._slots.free:
                os.kill(slot.zygotes["plain"].pid, signal.SIGKILL)
        return await run

    faults = box.sandbox.metrics.faults
    assert [result.outcome for result in box(scenario())] == [PASSED]
    assert box.sandbox.metrics.faults == faults + 1
    assert soon(lambda: box.strangers() == [])


def test_a_run_cannot_free_itself_from_its_zygote(box: Any) -> None:
    program = (
        "import ctypes, time\nctypes.CDLL(None).prctl(1, 0, 0, 0, 0)\ntime.sleep(30)\ndef add(a, b):\n    return 2"
    )

    async def scenario() -> None:
        run = asyncio.create_task(box.sandbox.test_program(program, ["assert add(1, 1) == 2"], Limits(cpu_seconds=30)))
        await asyncio.sleep(0.5)
        for slot in box.sandbox._slots.all:
            if slot not in box.sandbox._slots.free:
                os.kill(slot.zygotes["plain"].pid, signal.SIGKILL)
        await asyncio.sleep(0.5)
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)

    box(scenario())
    assert soon(lambda: box.strangers() == [])


def test_a_run_whose_zygotes_keep_dying_is_a_fault_not_a_zero(box: Any) -> None:
    async def scenario() -> list[Any]:
        await box.sandbox.test_program(HONEST, ["assert add(1, 1) == 2"])
        run = asyncio.create_task(box.sandbox.test_program("import time\ntime.sleep(9)", ["assert add(1, 1) == 2"]))
        while not run.done():
            await asyncio.sleep(0.02)
            for slot in box.sandbox._slots.all:
                if slot not in box.sandbox._slots.free and "plain" in slot.zygotes and not slot.zygotes["plain"].closed:
                    try:
                        os.kill(slot.zygotes["plain"].pid, signal.SIGKILL)
                    except ProcessLookupError:
                        continue
        return await run

    results = box(scenario())
    assert results[0].outcome is Outcome.SANDBOX_FAULT and results[0].value is None
    # It dies while it is asked to fork, or later.
    assert results[0].detail.startswith("fork: ") or "gone" in results[0].detail
    assert box(box.sandbox.test_program(HONEST, ["assert add(1, 1) == 2"]))[0].outcome is PASSED


def test_a_killed_template_is_replaced(box: Any) -> None:
    template = box.sandbox._slots.templates["plain"]
    template._process.kill()
    template._process.wait()
    results = [box(box.sandbox.test_program(HONEST, ["assert add(1, 1) == 2"])) for _ in range(4)]
    assert {result[0].outcome for result in results} == {PASSED}


def test_a_cancelled_run_is_ended_and_its_slot_is_free_again(box: Any) -> None:
    async def scenario() -> list[Any]:
        runs = [
            asyncio.create_task(box.sandbox.run("import time; time.sleep(99)", limits=Limits(cpu_seconds=60)))
            for _ in range(4)
        ]
        await asyncio.sleep(0.3)
        for run in runs:
            run.cancel()
        await asyncio.gather(*runs, return_exceptions=True)
        return await box.sandbox.test_program(HONEST, ["assert add(1, 1) == 2"])

    assert box(scenario())[0].outcome is PASSED
    assert box.sandbox.running == 0 and box.sandbox.waiting == 0
    assert soon(lambda: box.strangers() == [])


def test_a_full_queue_says_when_to_retry() -> None:
    async def scenario() -> None:
        async with Sandbox(slots=1, queue=2) as sandbox:
            runs = [asyncio.create_task(sandbox.run("import time; time.sleep(2)")) for _ in range(3)]
            await until(lambda: (sandbox.running, sandbox.waiting) == (1, 2))
            with pytest.raises(Busy) as busy:
                await sandbox.run("print(1)")
            assert busy.value.retry_after >= 1
            assert all(result.outcome is PASSED for result in await asyncio.gather(*runs))

    asyncio.run(scenario())


def test_closing_turns_running_and_waiting_runs_into_faults() -> None:
    async def scenario() -> list[Any]:
        async with Sandbox(slots=1) as sandbox:
            runs = [asyncio.create_task(sandbox.run("import time; time.sleep(30)")) for _ in range(3)]
            while sandbox.running < 1:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.3)
        return await asyncio.gather(*runs)

    assert {result.outcome for result in asyncio.run(scenario())} == {Outcome.SANDBOX_FAULT}


def mixed(rng: random.Random) -> tuple[str, list[str], list[int]]:
    """A program of a random kind, its tests, and the verdicts it must get."""
    a, b = rng.randrange(1000), rng.randrange(1000)
    kind = rng.choice(["right", "right", "right", "half", "raises", "exits", "prints", "judged", "files", "threads"])
    tests = [f"assert f({a}, {b}) == {a + b}", f"assert f({b}, {a}) == {a + b + 1}"]
    body = "def f(a, b):\n    return a + b\n"
    if kind == "raises":
        return "def f(a, b):\n    raise ValueError(a)\n", tests, [0, 0]
    if kind == "exits":
        return "import os\ndef f(a, b):\n    os._exit(0)\n", tests, [0, 0]
    if kind == "prints":
        return "def f(a, b):\n    print('x' * 10000)\n    return a + b\n", tests, [1, 0]
    if kind == "judged":
        return body, [f"assert abs(f({a}, {b}) - {a + b}) < 1e-9", f"assert abs(f({a}, {b}) - {a}.5) < 1e-9"], [1, 0]
    if kind == "files":
        return "def f(a, b):\n    open(f'/tmp/{a}', 'w').write('x' * 10000)\n    return a + b\n", tests, [1, 0]
    if kind == "threads":
        return (
            "import threading\ndef f(a, b):\n    out = []\n    t = threading.Thread(target=lambda: out.append(a + b))\n    t.start()\n    t.join()\n    return out[0]\n",
            tests,
            [1, 0],
        )
    return body, tests, [1, 0]


def _measure() -> tuple[int, int, int]:
    """Descriptors, mounts and objects that this process holds; memory depends on the allocator and is not counted."""
    own = [module for name, module in sys.modules.items() if name.startswith("upshot.sandbox")]
    for one in {one for module in own for one in vars(module).values() if type(one) is functools._lru_cache_wrapper}:
        one.cache_clear()  # which is bounded
    gc.collect()
    mounts = len(Path("/proc/self/mountinfo").read_text().splitlines())
    return len(os.listdir("/proc/self/fd")), mounts, len(gc.get_objects())


def test_a_soak_of_mixed_programs_leaks_nothing_and_gives_right_verdicts() -> None:
    rng = random.Random(5)
    others = descendants(os.getpid())
    wrong: list[Any] = []

    async def scenario() -> tuple[Any, Any, set[int]]:
        async with Sandbox(slots=4, limits=Limits(cpu_seconds=10, memory_mb=256)) as sandbox:
            gate = asyncio.Semaphore(12)

            async def one() -> None:
                program, tests, verdicts = mixed(rng)
                async with gate:
                    results = await sandbox.test_program(program, tests)
                if [result.value for result in results] != verdicts:
                    wrong.append((program, results))

            await asyncio.gather(*(one() for _ in range(60)))
            before = _measure()
            for _ in range(max(1, SOAK // 60)):  # as many as before: their tasks still exist and are counted
                await asyncio.gather(*(one() for _ in range(60)))
            after = _measure()
            family = descendants(os.getpid()) - others
            groups = list(sandbox._slots.cgroups.homes.values())
            workdir = sandbox._workdir
        assert not os.path.exists(workdir) and not any(group.exists() for group in groups)
        return before, after, family

    before, after, family = asyncio.run(scenario())
    assert wrong == []
    assert after[0] <= before[0] + 4 and after[1] == before[1]
    assert after[2] <= before[2] + 500
    assert soon(lambda: not alive(family))


def test_stdio_and_asserts_share_the_slots(box: Any) -> None:
    async def scenario() -> list[Any]:
        stdio = [box.sandbox.test_stdio("print(int(input()) * 2)", [StdioTest(str(i), str(2 * i))]) for i in range(10)]
        asserts = [box.sandbox.test_program(HONEST, [f"assert add({i}, {i}) == {2 * i}"]) for i in range(10)]
        return await asyncio.gather(*stdio, *asserts)

    assert all(result[0].outcome is PASSED for result in box(scenario()))
