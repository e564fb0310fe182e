"""Threads: no more than the process may use."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from upshot.core import threads


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "max 100000\n"}, math.inf),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4.0),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, math.inf),
        ({"cpu.max": "odd\n"}, math.inf),
        ({}, math.inf),
    ],
)
def test_the_cpu_quota_of_a_container_is_read(files: dict[str, str], expected: float, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert threads.quota(tmp_path) == expected


@pytest.mark.parametrize(("stated", "expected"), [("3", 3), ("4,2", 4), ("", None), ("many", None), (None, None)])
def test_the_thread_count_is_that_of_the_environment_or_the_cores(
    stated: str | None, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if stated is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", stated)
    assert threads.thread_count() == (expected or threads.cores())


def test_a_process_has_at_least_one_core_and_no_more_than_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    own = len(os.sched_getaffinity(0))
    for granted, expected in ((math.inf, own), (0.2, 1), (own + 3.0, own)):
        monkeypatch.setattr(threads, "quota", lambda cgroup, granted=granted: granted)
        assert threads.cores() == expected


@pytest.mark.parametrize(("given", "expected"), [({}, "passive"), ({"OMP_WAIT_POLICY": "active"}, "active")])
def test_the_command_line_sets_threads_before_torch_loads_unless_already_set(
    given: dict[str, str], expected: str
) -> None:
    code = "import os, sys; from upshot.cli import main\ntry: main(['--version'])\nexcept SystemExit: pass\n"
    code += "assert 'torch' not in sys.modules; print(os.environ['OMP_WAIT_POLICY'])"
    env = {key: value for key, value in os.environ.items() if key not in threads.CALM} | given
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    assert done.stdout.split()[-1] == expected


def test_once_torch_is_loaded_the_environment_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", sys)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    threads.settle_threads()
    assert "OMP_WAIT_POLICY" not in os.environ
