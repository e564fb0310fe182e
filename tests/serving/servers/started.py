"""Servers for tests: `upshot serve FILE.yaml` as a process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.patience import wait_until
from upshot.serving.servers.state import folder_of, read_state, ready


def alive(pid: int) -> bool:
    """Whether a process is running; a zombie is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


class Started:
    """The servers of a file in a process of their own."""

    def __init__(self, file: Path, *words: str, **environment: str) -> None:
        self.file, self.folder = file, folder_of(file)
        command = [sys.executable, "-m", "upshot.cli", "serve", str(file), *words]
        self.process = subprocess.Popen(
            command, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # tests under nohup ignore it
        )  # fmt: skip

    def ready(self) -> dict[str, Any]:
        """Its state, once all servers run."""

        def look() -> dict[str, Any] | None:
            assert self.process.poll() is None, self.process.communicate()[0]
            state = read_state(self.folder)
            return state if ready(state) else None

        return dict(wait_until(look))

    def end(self, number: int = signal.SIGTERM) -> str:
        """Its output, once it has ended."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return str(self.process.communicate()[0])
