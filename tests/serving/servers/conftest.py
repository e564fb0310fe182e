"""A serve file whose vLLM is a stand-in that starts at once."""

from __future__ import annotations

import os
import signal
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from upshot.serving.servers.state import folder_of, read_state

FAKE = Path(__file__).parent / "fake_vllm.py"


@pytest.fixture
def serve_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Path]]:
    """Write a serve file; `program: vllm` means the stand-in."""
    program = tmp_path / "bin" / "vllm"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -S {FAKE} "$@"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_FOLDER", str(tmp_path))
    monkeypatch.delenv("UPSHOT_API_KEY", raising=False)
    monkeypatch.chdir(tmp_path)

    def write(text: str) -> Path:
        file = tmp_path / "servers.yaml"
        file.write_text(text)
        return file

    yield write
    state = read_state(folder_of(tmp_path / "servers.yaml"))
    if state is not None:  # a failed test must not leave it behind
        os.kill(state["pid"], signal.SIGKILL)
