"""Applies to all tests: properties have no deadline, PyTorch draws the same numbers in every run, time limits follow
the speed of the machine, Ctrl-C works."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.durations import Recorder, balance, read_recording
from tests.patience import patience
from tests.support import forked
from tests.support.interpreter import choose_interpreter

choose_interpreter()
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # otherwise it goes to the network when it is imported

# A busy machine must not fail a property. And two runs of one commit should agree: with new examples in every run, CI
# would fail for unrelated changes. `pytest --hypothesis-profile explore` draws new examples.
untimed: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("explore", **untimed)
settings.register_profile("repeatable", derandomize=True, **untimed)
settings.load_profile("repeatable")

# What a test writes need not survive a power failure. Waiting for the disk takes longer than many training steps, and
# on a busy disk every file created or removed takes milliseconds: test folders are in memory if there is room.
os.fsync = lambda file: None  # type: ignore[assignment]
MEMORY, ROOM = Path("/dev/shm"), 4 << 30
if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > ROOM:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))

# Started in the background by a shell, the tests and every command that they start would ignore it.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option with which `make durations` times the tests."""
    parser.addoption("--record-durations", action="store_true", help="time every test and write tests/durations.json")


def pytest_configure(config: pytest.Config) -> None:
    """Time the tests if asked to."""
    if config.getoption("record_durations"):
        config.pluginmanager.register(Recorder())


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Mark the tests that were recorded as long; order the selected tests for two processes."""
    recording = read_recording()
    for item in items:
        if item.nodeid in recording.long:
            item.add_marker(pytest.mark.long)
    yield
    if hasattr(config, "workerinput"):
        order = balance([item.nodeid for item in items], recording, "not long" not in config.option.markexpr)
        items[:] = [items[at] for at in order]


def pytest_collection_finish() -> None:
    """What was collected lives as long as the process, so the final garbage collection need not look through it."""
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)  # models, kernels and parsers make many objects and few cycles
    atexit.register(gc.unfreeze)  # triton's bindings report as leaked what stays frozen to the end


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> Iterator[Any]:
    """Everything is imported and nothing has run yet: the server from which processes are forked starts here."""
    if session.items and not session.config.option.collectonly:
        forked.start_server()
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[Any]:
    """A test without a limit of its own has the default one, in seconds of a quiet machine."""
    if item.get_closest_marker("timeout") is None:
        item.add_marker(pytest.mark.timeout(patience(float(item.config.getini("timeout")))))
    return (yield)


@pytest.fixture(autouse=True)
def _seed_torch() -> None:
    """Make failures that depend on random numbers repeatable; hypothesis seeds Python's and NumPy's generators, not
    PyTorch's.

    Without a GPU, only the CPU's generator: `manual_seed` formats the stack for devices that may be initialized later.
    """
    if (torch := sys.modules.get("torch")) is not None:
        (torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed)(0)
