# ruff: noqa: E501 (the programs are one line each)
"""What a run may use: time of all its processes, threads, number of processes; and how output is compared."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.patience import patience
from tests.sandbox.conftest import make_box
from upshot.sandbox import Limits, Outcome, StdioTest
from upshot.sandbox.inside import cpu_time
from upshot.sandbox.inside.confine import Walls, _plan
from upshot.sandbox.inside.zygote import WatchedChild
from upshot.sandbox.local.cgroup import SLACK_PROCESSES, SlotGroup
from upshot.sandbox.local.layers import user_id_base
from upshot.sandbox.local.zygotes import Zygote, ZygoteGone

LOOPS = "import os\nfor _ in range({count}):\n    if os.fork() == 0:\n        while True: pass\nfor _ in range({count}): os.wait()"


def needs_processes(box: Any) -> None:
    """Skip if programs may not start processes."""
    if box.sandbox.layers.namespaces is None:
        pytest.skip("only a PID namespace lets a program start processes")


@pytest.mark.parametrize("count", [1, 8])
def test_cpu_seconds_count_every_process_of_the_run(count: int, box: Any) -> None:
    needs_processes(box)
    limits = Limits(cpu_seconds=0.5, wall_seconds=patience(20))
    result = box(box.sandbox.run(LOOPS.format(count=count), limits=limits))
    assert result.outcome is Outcome.TIMEOUT and "CPU limit" in result.detail and result.cpu_seconds >= 0.5, result


def test_cpu_seconds_count_processes_that_have_ended(box: Any) -> None:
    needs_processes(box)
    brief = "import os, time\nfor _ in range(200):\n    if os.fork() == 0:\n        end = time.process_time() + 0.1\n        while time.process_time() < end: pass\n        os._exit(0)\n    os.wait()"
    result = box(box.sandbox.run(brief, limits=Limits(cpu_seconds=0.5, wall_seconds=patience(20))))
    assert result.outcome is Outcome.TIMEOUT and "CPU limit" in result.detail, result


def test_cpu_seconds_count_every_process_of_other_languages(box: Any) -> None:
    needs_processes(box)
    limits = Limits(cpu_seconds=0.5, wall_seconds=patience(20))
    result = box(box.sandbox.run("(while :; do :; done) & wait", "bash", limits=limits))
    assert result.outcome is Outcome.TIMEOUT and "CPU limit" in result.detail, result


def test_thirty_threads_fit_the_default_limits(box: Any) -> None:
    program = (
        "import threading\ngate = threading.Barrier(29)\ndef work():\n    x = [bytearray(100) for _ in range(1000)]\n    gate.wait()\n"
        "threads = [threading.Thread(target=work) for _ in range(28)]\n[t.start() for t in threads]\ngate.wait()\n[t.join() for t in threads]\nprint('all')"
    )
    result = box(box.sandbox.run(program, limits=Limits()))
    assert result.stdout == "all\n", result


def test_the_process_count_follows_the_run_even_where_memory_does_not(tmp_path: Path) -> None:
    for name in ("memory.max", "memory.events"):
        (tmp_path / name).touch()
    group = SlotGroup({"memory": tmp_path, "pids": tmp_path})
    for processes in (40, 12):
        group.limit_to(Limits(processes=processes))
        assert (tmp_path / "pids.max").read_text() == str(processes + SLACK_PROCESSES)


def test_a_run_without_its_own_user_is_not_charged_for_other_processes() -> None:
    limits = {**Limits().as_request(), "base_bytes": 0}

    def bounds_processes(namespaces: str | None, uid: int | None) -> bool:
        walls = Walls(namespaces, 5, True, uid, "/tmp")
        return any(name.startswith("setrlimit(6") for _, _, name in _plan(walls, limits))

    assert bounds_processes("user", None) and bounds_processes("root", 60_000) and bounds_processes(None, 60_000)
    assert not bounds_processes("root", None) and not bounds_processes(None, None)


@pytest.mark.parametrize(
    ("mapped", "base"), [("0 100000 65536", 60_000), ("0 1000 1", None), ("0 0 1000\n1000 5 100", None)]
)
def test_user_ids_come_from_the_range_that_the_container_maps(
    mapped: str, base: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from upshot.sandbox.local import layers

    file = tmp_path / "uid_map"
    file.write_text(mapped)
    monkeypatch.setattr(layers, "UID_MAP", str(file))
    assert user_id_base() == base


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("  *\n ***\n", "  *\n ***", True),
        ("*\n ***\n", "  *\n ***", False),
        ("\n\n1 \n2\n\n", "1\n2", True),
        ("1\r\n2\r\n", "1\n2\n", True),
        ("1\u20282", "1\n2", False),
        ("", "\n", True),
        ("1", "", False),
    ],
)
def test_leading_blanks_of_the_output_are_compared(printed: str, expected: str, same: bool, box: Any) -> None:
    program = f"import sys\nsys.stdout.write({printed!r})"
    assert box(box.sandbox.test_stdio(program, [StdioTest("", expected)]))[0].passed is same


JOINS = """
import os, time
child = os.fork()
if child == 0:
    os.setpgid(0, 0)
    time.sleep(30)
while os.getpgid(child) != child:
    time.sleep(0.01)
for own in (0, os.getpid()):
    try:
        os.setpgid(own, child)
    except PermissionError:
        print("refused")
os.setpgid(child, os.getpgid(0))
print(os.getpgid(child) == os.getpgid(0))
"""


def test_the_first_process_of_a_run_cannot_join_a_group_that_would_keep_it_from_ending(box: Any) -> None:
    needs_processes(box)
    result = box(box.sandbox.run(JOINS))
    assert (result.outcome, result.stdout) == (Outcome.PASSED, "refused\nrefused\nTrue\n"), result


def test_without_namespaces_a_program_cannot_join_the_zygotes_group() -> None:
    box = make_box(disable={"namespaces", "cgroup"})
    program = "import os\nfor own in (0, os.getpid()):\n    try: os.setpgid(own, os.getpgid(os.getppid()))\n    except PermissionError: print('refused')"
    try:
        assert box(box.sandbox.run(program)).stdout == "refused\nrefused\n"
    finally:
        box.close()


def test_time_that_a_busy_machine_took_from_a_run_extends_its_wall_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    child = subprocess.Popen(["sleep", "3600"])
    proc = cpu_time.open_proc()
    walls = SimpleNamespace(namespaces=None)
    zygote: Any = SimpleNamespace(proc=proc, walls=walls, cores=1)
    watched = WatchedChild(child.pid, os.open(os.devnull, os.O_RDONLY), zygote)
    try:
        assert cpu_time.spent_waiting(proc, os.getpid()) >= 0 and cpu_time.spent_waiting(proc, 1 << 30) == 0
        monkeypatch.setattr(cpu_time, "spent_waiting", lambda *_: 50.0)
        late = time.monotonic() - 5
        assert 0 < watched.check(1.0, late, most_extra=10.0) < 6 and watched.why is None
        watched.check(1.0, late, most_extra=4.0)
        assert watched.why == "wall"
    finally:
        child.kill()
        child.wait()
        os.close(proc)


HOARDER = """
import fcntl, os, socket
held, kept = 0, []
def fill(descriptor):
    global held
    os.set_blocking(descriptor, False)
    try:
        while True: held += os.write(descriptor, bytes(1 << 16))
    except BlockingIOError: pass
def sockets():
    pair = socket.socketpair()
    for end in pair: end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 30)
    kept.append(pair)
    return [end.fileno() for end in pair]
def pipes():
    end, other = os.pipe()
    try: fcntl.fcntl(other, fcntl.F_SETPIPE_SZ, 1 << 20)
    except PermissionError: pass
    return [other]
try:
    while True:
        for descriptor in %s(): fill(descriptor)
except OSError: print(held >> 20)
"""


@pytest.mark.parametrize("what", ["sockets", "pipes"])
@pytest.mark.parametrize("disable", [{"cgroup"}, {"cgroup", "namespaces"}], ids=["namespaces", "none"])
def test_data_in_sockets_and_pipes_stays_small_if_no_cgroup_counts_it(what: str, disable: set[str]) -> None:
    box = make_box(disable=disable)
    try:
        result = box(
            box.sandbox.run(HOARDER % what, limits=Limits(cpu_seconds=5, wall_seconds=patience(20), memory_mb=64))
        )
        assert result.outcome is Outcome.PASSED and 1 <= int(result.stdout) < 40, result
    finally:
        box.close()


FORKS_AND_FILLS = """
import os
def fill():
    for _ in range(30):
        try:
            if os.fork() == 0: break
        except OSError: break
    kept = []
    while True:
        try: kept.append(bytearray(1 << 20))
        except MemoryError: pass
{when}
def f(): {then}
"""


@pytest.mark.parametrize("when", ["fill()", ""], ids=["at once", "when asked"])
def test_a_program_that_forks_and_fills_memory_fails_without_a_fault(when: str, box: Any) -> None:
    needs_processes(box)
    program = FORKS_AND_FILLS.format(when=when, then="fill()")
    limits = Limits(cpu_seconds=0.5, wall_seconds=patience(4), memory_mb=64)
    for tests in (["assert f() == 1"], ["x = f()\nassert x == 1 and isinstance(x, int)"]):
        (result,) = box(box.sandbox.test_program(program, tests, limits))
        assert result.value == 0, result


@pytest.mark.parametrize("walls", [True, False])
def test_a_silent_zygote_is_a_timeout_if_the_program_was_running_and_a_fault_if_not(
    walls: bool, box: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def say_nothing(self: Zygote, _: float) -> Any:
        if walls:
            await asyncio.sleep(patience(1.0))
        self.close()
        raise ZygoteGone("silent") from TimeoutError()

    monkeypatch.setattr(Zygote, "finish", say_nothing)
    monkeypatch.setattr(Zygote, "send", Zygote.send if walls else lambda *_: None)
    (result,) = box(box.sandbox.test_program("import time\ntime.sleep(9)", ["assert f() == 1"]))
    assert result.outcome is (Outcome.TIMEOUT if walls else Outcome.SANDBOX_FAULT), result
