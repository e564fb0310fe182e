"""Runs verl's program in its own session: its lines are kept, and nothing of it survives, however this process ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from upshot.core.process import Reaper, end_session, parent_death_hook, session_members

LOG = "verl.log"
"""verl's log in the run folder."""
GRACE_S = 20.0
"""Seconds for verl to end after an interrupt."""
LAST_WORDS_S = 1.0
"""Seconds in which processes that the program left behind may still write."""
REASON = "upshot: "
"""Prefix of the line with an error that the user can fix."""
SHM = Path("/dev/shm")
SEGMENTS = ("psm_", "torch_", "plasma", "sem.", "nccl-", "vllm", "VLLM")
"""Prefixes of the shared memory of Python, PyTorch, Ray, NCCL and vLLM; a user's files have other names."""


@contextlib.contextmanager
def stop_on_sigterm() -> Iterator[None]:
    """Inside, SIGTERM raises `SystemExit`, if this thread may set signal handlers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run(
    words: Sequence[str], env: dict[str, str], log: Path, say: Callable[[str], None], grace_s: float = GRACE_S
) -> int:
    """Run a program to its end; its lines go to the log and to `say`. However this ends, its session ends with it.

    `grace_s`: seconds for it to end its step after SIGTERM, which a scheduler sends before it takes the machine away.
    If we are killed, the kernel ends the program with us, and the reaper ends the rest of its session.
    """
    reaper = Reaper()
    began = time.time()
    with log.open("a") as file:
        streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        group: dict[str, Any] = {"start_new_session": True, "preexec_fn": parent_death_hook()}
        process = subprocess.Popen(words, env=env, errors="replace", **streams, **group)
        reaper.watch(process.pid)
        threading.Thread(target=_end_behind, args=(process,), daemon=True).start()
        notice, seconds = signal.SIGINT, GRACE_S
        try:
            assert process.stdout is not None
            for line in process.stdout:
                file.write(line)
                file.flush()
                say(line.rstrip("\n"))
            return process.wait()
        except SystemExit:
            notice, seconds = signal.SIGTERM, grace_s
            raise
        finally:
            reader = threading.Thread(target=_read_rest, args=(process, file), daemon=True)
            reader.start()  # reads what it writes while it ends: with a full pipe it could not end
            end(process, notice, seconds)
            reader.join(LAST_WORDS_S)
            reaper.forget(process.pid)
            reaper.close()
            sweep(began)


def _read_rest(process: subprocess.Popen[str], file: TextIO) -> None:
    assert process.stdout is not None
    with contextlib.suppress(ValueError):  # closed by the thread that waited for us
        for line in process.stdout:
            file.write(line)


def _end_behind(process: subprocess.Popen[str]) -> None:
    """When the program has ended, end the processes it left: they may hold the pipe that we read."""
    process.wait()
    time.sleep(LAST_WORDS_S)
    end_session(process.pid)


def end(process: subprocess.Popen[str], notice: int, seconds: float) -> None:
    """Ask a program to end, so that it can close its helpers; then kill its whole session."""
    if process.poll() is None:
        process.send_signal(notice)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
    for _ in range(100):  # processes that were just being started appear a moment later
        end_session(process.pid)
        if not session_members(process.pid):
            break
        time.sleep(0.05)
    process.wait()


def reason_in(log: Path) -> str | None:
    """The error at the end of the log that the user can fix; None if the program ended differently."""
    lines = log.read_text(errors="replace").splitlines()[-50:]
    return next((line.removeprefix(REASON) for line in reversed(lines) if line.startswith(REASON)), None)


def sweep(since: float) -> list[str]:
    """Remove shared memory that we made since then and that nobody holds; returns the names.

    vLLM's processes leave theirs behind when they are killed. Other running programs hold their own segments.
    """
    stale = []
    for path in SHM.glob("*"):
        with contextlib.suppress(OSError):
            stat, is_segment = path.stat(), path.name.startswith(SEGMENTS) and path.is_file()
            ours = stat.st_uid == os.getuid() and stat.st_ctime >= since
            if is_segment and ours and stat.st_mtime < time.time() - 1:
                stale.append(path)
    held = _list_mapped() if stale else ""
    gone = [path for path in stale if str(path) not in held]
    for path in gone:
        with contextlib.suppress(OSError):
            path.unlink()
    return [path.name for path in gone]


def _list_mapped() -> str:
    """All shared memory that running processes have mapped, as far as we may read it."""
    out = []
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            out += [line for line in maps.read_text().splitlines() if "/dev/shm/" in line]
    return "\n".join(out)
