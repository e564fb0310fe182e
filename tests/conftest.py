"""What holds for all tests: properties are searched without a clock, PyTorch draws the same numbers in every run,
deadlines follow the machine, Ctrl-C is heeded."""

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
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks the network when it is imported

# A busy machine is not a property's fault. And two runs of one commit should agree: with new examples in every run, CI
# fails for changes that have nothing to do with it. `pytest --hypothesis-profile explore` draws new ones.
untimed: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("explore", **untimed)
settings.register_profile("repeatable", derandomize=True, **untimed)
settings.load_profile("repeatable")

# What a test writes need not survive a power failure. Waiting for the disk takes longer than many a training step, and
# where it is busy every file that is made or removed takes milliseconds: folders of tests lie in memory if it has room.
os.fsync = lambda file: None  # type: ignore[assignment]
MEMORY, ROOM = Path("/dev/shm"), 4 << 30
if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > ROOM:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))

# A shell that starts the tests in the background has them, and every command that they start, ignore it.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """How `make durations` times the tests."""
    parser.addoption("--record-durations", action="store_true", help="time every test and write tests/durations.json")


def pytest_configure(config: pytest.Config) -> None:
    """Time the tests where that is asked for."""
    if config.getoption("record_durations"):
        config.pluginmanager.register(Recorder())


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Mark the tests that were recorded as long; put those that are chosen in an order that two processes share."""
    recording = read_recording()
    for item in items:
        if item.nodeid in recording.long:
            item.add_marker(pytest.mark.long)
    yield
    if hasattr(config, "workerinput"):
        order = balance([item.nodeid for item in items], recording, "not long" not in config.option.markexpr)
        items[:] = [items[at] for at in order]


def pytest_collection_finish() -> None:
    """What was collected lives as long as the process: a run's last collection of garbage need not look through it."""
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)  # models, kernels and parsers make many objects and few circles
    atexit.register(gc.unfreeze)  # triton's bindings report as leaked what stays frozen to the end


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> Iterator[Any]:
    """All is imported and nothing has run: from here processes are forked."""
    if session.items and not session.config.option.collectonly:
        forked.start_server()
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[Any]:
    """A test that names no limit has the usual one, in seconds of a quiet machine."""
    if item.get_closest_marker("timeout") is None:
        item.add_marker(pytest.mark.timeout(patience(float(item.config.getini("timeout")))))
    return (yield)


@pytest.fixture(autouse=True)
def _seed_torch() -> None:
    """A failure that depends on numbers drawn can be seen again; hypothesis seeds Python's and NumPy's, not PyTorch's.

    Without a GPU the CPU's generator alone: `manual_seed` formats the stack for devices that may still be initialized.
    """
    if (torch := sys.modules.get("torch")) is not None:
        (torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed)(0)
