"""A run's use of a fleet: brought up if it is not, shared if it is, and down when the last run has ended.

Runs hold a lock together. A fleet that a run started ends itself as soon as nobody holds it, so a run that is killed
leaves nothing behind; one that was started by hand (`upshot serve FILE.yaml`) stays.
"""

from __future__ import annotations

import fcntl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from upshot.core.errors import UserError
from upshot.serving.servers.command import tail
from upshot.serving.servers.file import read
from upshot.serving.servers.server import GRACE_S
from upshot.serving.servers.state import POLL_S, USERS_LOCK, check_text, folder_of, is_up, lock, read_state, ready

LOG = "fleet.log"
"""What the fleet says when a run has started it."""


@contextmanager
def lease(file: str | None, say: Callable[[str], None]) -> Iterator[None]:
    """Have the fleet of a serve file up; nothing happens where there is no file."""
    if file is None:
        yield
        return
    started: subprocess.Popen[bytes] | None = None
    folder = folder_of(file)
    within_s = read(file).start_s
    try:
        with lock(folder / USERS_LOCK, fcntl.LOCK_SH):
            if not is_up(folder):
                say(f"servers    starting those of {file} (logs: {folder})")
                started = _start(file, folder)
            state = _wait(file, folder, started, within_s)
            say("servers    " + ", ".join(f"{name} {server['url']}" for name, server in state["servers"].items()))
            yield
    finally:
        if started is not None and _nobody_else(folder):
            _see_off(started)


def _start(file: str, folder: Path) -> subprocess.Popen[bytes]:
    """In a session of its own: the Ctrl-C that makes a run save its checkpoint must not end its helpers before."""
    words = [sys.executable, "-m", "upshot.cli", "serve", str(Path(file).resolve()), "--while-used"]
    with (folder / LOG).open("wb") as log:
        return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)


def _wait(file: str, folder: Path, started: subprocess.Popen[bytes] | None, within_s: float) -> dict[str, Any]:
    """The state once all servers run. A fleet that another run started in the same moment will do as well."""
    deadline = time.monotonic() + within_s + 30
    while time.monotonic() < deadline:
        ended = started is None or started.poll() is not None
        up = is_up(folder)
        state = read_state(folder)
        if state is not None:
            check_text(file, state)
            if ready(state):
                return state
        if ended and not up and not is_up(folder):
            raise UserError(f"the servers of '{file}' did not start: {tail(folder / LOG)}")
        time.sleep(POLL_S)
    raise UserError(f"the servers of '{file}' are not all running after {within_s:g} s; `upshot serve status {file}`")


def _nobody_else(folder: Path) -> bool:
    with lock(folder / USERS_LOCK, fcntl.LOCK_EX | fcntl.LOCK_NB) as free:
        return free


def _see_off(started: subprocess.Popen[bytes]) -> None:
    """Wait for its end, which it comes to by itself: its memory is needed by whatever runs next."""
    try:
        started.wait(2 * GRACE_S)
    except subprocess.TimeoutExpired:
        return  # another run has taken it over
