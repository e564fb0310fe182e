"""verl's program and everything it has started end with the command, however that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.patience import wait_until
from upshot.verl import process
from upshot.verl.process import reason_in, run, sweep

PROGRAM = """
import os, subprocess, sys, time
own_group = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], process_group=0)
print("pids", os.getpid(), own_group.pid, flush=True)
time.sleep(60)
"""
"""Starts a process in a group of its own, as Ray does with its workers."""
COMMAND = f"""
import os, sys
from pathlib import Path
from upshot.verl.process import run
run([sys.executable, "-c", {PROGRAM!r}], dict(os.environ), Path(sys.argv[1]), lambda line: print(line, flush=True))
"""


def soon(fits: Callable[[], bool]) -> bool:
    return wait_until(fits)


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG and /proc are Linux's")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_command_takes_the_program_and_its_groups_with_it(tmp_path: Path, how: signal.Signals) -> None:
    words = [sys.executable, "-c", COMMAND, str(tmp_path / "log")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as command:
        assert command.stdout is not None
        pids = [int(word) for word in command.stdout.readline().split()[1:]]
        assert len(pids) == 2
        command.send_signal(how)
        assert all(soon(lambda pid=pid: gone(pid)) for pid in pids)  # type: ignore[misc]


def test_processes_that_a_program_leaves_running_are_ended(tmp_path: Path) -> None:
    leaves = PROGRAM.rsplit("time.sleep(60)\n", 1)[0]
    said: list[str] = []
    assert run([sys.executable, "-c", leaves], dict(os.environ), tmp_path / "log", said.append) == 0
    assert soon(lambda: gone(int(said[0].split()[2])))


def test_output_of_a_program_while_it_ends_is_kept(tmp_path: Path) -> None:
    code = "import time, signal, sys; signal.signal(signal.SIGINT, lambda *_: sys.exit('closed' * 50_000)); "
    code += "print('up', flush=True); time.sleep(60)"

    def stop(line: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run([sys.executable, "-c", code], dict(os.environ), tmp_path / "log", stop)
    assert (tmp_path / "log").read_text().count("closed") == 50_000


def test_the_reason_is_the_last_line_that_our_program_said(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("step:1\nupshot: the budget is spent\n(raylet) bye\n")
    assert reason_in(log) == "the budget is spent"
    log.write_text("Traceback\nValueError: x\n")
    assert reason_in(log) is None


def test_segments_created_meanwhile_that_nobody_holds_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "SHM", tmp_path)
    began, mark = time.time() - 100, process.SEGMENTS[0]
    for name in ("left", "held", "fresh"):
        (tmp_path / f"{mark}{name}").write_text("x")
        os.utime(tmp_path / f"{mark}{name}", (began + 1, began + 1 + 200 * (name == "fresh")))
    (tmp_path / "somebody-elses").write_text("x")
    os.utime(tmp_path / "somebody-elses", (began + 1, began + 1))
    monkeypatch.setattr(process, "_list_mapped", lambda: f"7f00-7f01 rw-s 0 00:01 1  {tmp_path / f'{mark}held'}")
    assert sweep(began) == [f"{mark}left"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([f"{mark}fresh", f"{mark}held", "somebody-elses"])
    assert sweep(time.time() + 100) == []
