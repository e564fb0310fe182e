"""Whole runs on verl, started as a user would, plus the settings for a CPU; each in its own process group."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.patience import patience
from upshot.verl.checks.watchdog import last_line, size_of

WARM = ("warm_start.steps=40", "warm_start.batch=16")
SMALL = ("credit.by=reply", "train.prompts_per_step=4", "train.group_size=4", "task.rows_per_split=64", *WARM)
"""A small quickstart: a few seconds per step."""
SILENT_S = 300.0
"""Seconds of a quiet machine without output or a step after which a run counts as stuck."""
TAKEN = "EADDRINUSE"
"""vLLM and verl look for a free port and bind it seconds later; if other runs start, another one may be faster."""
ENV = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "HYDRA_FULL_ERROR": "1",
    "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])]),
}
"""Other packages also bring a package `tests`: ours must come first where workers import from it."""


@dataclass(frozen=True)
class VerlRun:
    """A run that has ended."""

    folder: Path
    code: int
    said: str
    """What the command printed, both streams."""
    seconds: float

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl of the method's phase."""
        text = (self.folder / "metrics.jsonl").read_text().splitlines()
        return [line for line in map(json.loads, text) if line["phase"] != "warm-start"]

    def series(self, name: str) -> list[float]:
        """A metric at every step that has it."""
        return [line[name] for line in self.lines if name in line]

    @property
    def log(self) -> str:
        """verl's own output; empty if verl was not started."""
        path = self.folder / "verl.log"
        return path.read_text(errors="replace") if path.is_file() else ""


def verl_run(
    folder: Path,
    *overrides: str,
    recipe: str = "quickstart",
    ranks: int = 2,
    env: Mapping[str, str] | None = None,
    words: tuple[str, ...] = (),
    check: bool = True,
) -> VerlRun:
    """Run a recipe on verl in `folder`; `words` are further arguments (`--resume` and the like).

    With `check`, a run that fails raises an AssertionError with the end of its output.
    """
    named = [recipe, f"run_dir={folder}"] if recipe else []
    command = [sys.executable, "-m", "tests.support.verl_cpu", *named, *words]
    command += [*([f"trainer.n_gpus_per_node={ranks}"] if ranks else []), *overrides]
    done = _end_of(command, folder, env)
    if done.code and recipe and TAKEN in done.log:
        shutil.rmtree(folder)
        done = _end_of(command, folder, env)
    assert not check or done.code == 0, f"exit code {done.code} after {done.seconds:.0f} s:\n{done.said[-6000:]}"
    return done


class Signs:
    """Progress of a run: a new line in its log (other than the watchdog's), a new step, or new output of the
    command."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._seen: object = None
        self._since = time.monotonic()

    def silent(self) -> float:
        """Seconds since the last progress."""
        logs = [last_line(self.folder / "verl.log"), last_line(said_by(self.folder))]
        seen = (*logs, size_of(self.folder / "metrics.jsonl"))
        if seen != self._seen:
            self._seen, self._since = seen, time.monotonic()
        return time.monotonic() - self._since


def _end_of(command: list[str], folder: Path, env: Mapping[str, str] | None) -> VerlRun:
    """Run a command to its end, or until it is silent for too long."""
    process = start(command, folder, env)
    began = time.monotonic()
    try:
        code = wait_for(process, folder)
    finally:
        end(process)
    return VerlRun(folder, code, said_by(folder).read_text(errors="replace"), time.monotonic() - began)


def wait_for(process: subprocess.Popen[bytes], folder: Path) -> int:
    """The exit code of a started command; 124 if it is silent for too long."""
    signs = Signs(folder)
    while process.poll() is None and signs.silent() < patience(SILENT_S):
        time.sleep(0.5)
    return 124 if process.returncode is None else process.returncode


def start_locally(folder: Path, *overrides: str, recipe: str = "quickstart") -> subprocess.Popen[bytes]:
    """Start a recipe in local mode."""
    command = [sys.executable, "-m", "upshot.cli", "train", recipe, f"run_dir={folder}", *overrides]
    return start(command, folder)


def locally(folder: Path, *overrides: str, recipe: str = "quickstart") -> None:
    """Run a recipe in local mode to its end."""
    process = start_locally(folder, *overrides, recipe=recipe)
    try:
        code = wait_for(process, folder)
        assert code == 0, f"exit code {code}:\n{said_by(folder).read_text(errors='replace')[-6000:]}"
    finally:
        end(process)


def start(command: list[str], folder: Path, env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Start a command in its own process group; its output goes to a file beside the folder (`said_by`)."""
    with said_by(folder).open("ab") as file:
        told = {**os.environ, **ENV, **(env or {})}
        return subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True, env=told, cwd=folder.parent
        )


def said_by(folder: Path) -> Path:
    """The path of a started command's output."""
    return folder.parent / f"{folder.name}.said"


def end(process: subprocess.Popen[bytes]) -> None:
    """Interrupt a command, as Ctrl-C does, and kill what is left of its group."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
