"""A run on verl in progress: its steps, processes and shared memory, and whether anything is left of it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.patience import patience
from tests.verl.real.verl_run import ENV, SILENT_S, Signs
from upshot.config.recipe import TinyConfig
from upshot.core.process import session_members
from upshot.models.tiny import tiny_model, tiny_tokenizer
from upshot.run.folder import RunFolder
from upshot.tasks.slots import SlotsTask
from upshot.verl.checkpoints import newest_step

SMALL = (
    *("credit.by=reply", "train.prompts_per_step=4", "train.group_size=4", "train.steps=500", "train.save.every=1"),
    "eval.every=0",
    *("task.rows_per_split=64", "warm_start=null", "upshot.watch.silent_s=20"),
)
"""A run that would last long, and saves every step."""
LEFT_S = 30.0


class UnderWay:
    """A command in its own session, and what it has started."""

    def __init__(self, folder: Path, words: list[str]) -> None:
        self.folder = folder
        self.said = folder.parent / f"{folder.name}.said"
        self.seen: dict[int, str] = {}
        """Every process that was seen, by its id, with its start time."""
        self.segments: set[str] = set()
        env = {**os.environ, **ENV}
        with self.said.open("ab") as file:
            self.process = subprocess.Popen(
                words, stdout=file, stderr=subprocess.STDOUT, start_new_session=True, env=env, cwd=folder.parent
            )

    @property
    def steps(self) -> int:
        """Steps in metrics.jsonl."""
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.is_file() else []
        return max((line["step"] for line in map(json.loads, lines) if line["phase"] == "rl"), default=0)

    @property
    def saved(self) -> int:
        """The step of the newest complete checkpoint."""
        return newest_step(RunFolder(self.folder))

    @property
    def log(self) -> str:
        """verl's output."""
        path = self.folder / "verl.log"
        return path.read_text(errors="replace") if path.is_file() else ""

    @property
    def words(self) -> str:
        """What the command itself printed."""
        return self.said.read_text(errors="replace")

    def look(self) -> list[int]:
        """The processes below the command, recorded with the segments that they have mapped."""
        parents = {pid: _stat(pid)[1] for pid in _all()}
        found = {self.process.pid}
        while more := {pid for pid, parent in parents.items() if parent in found} - found:
            found |= more
        for leader in [pid for pid in found if _stat(pid)[2] == pid]:
            found |= set(session_members(leader))
        self.seen |= {pid: _stat(pid)[3] for pid in found}
        for pid in found:
            with contextlib.suppress(OSError):
                lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
                self.segments |= {line.split()[-1] for line in lines if "/dev/shm/" in line and "(deleted)" not in line}
        return sorted(found)

    def named(self, word: str) -> list[int]:
        """Processes whose command line contains a text."""
        return [pid for pid in self.look() if word in _command(pid)]

    def until(self, sign: Callable[[], object]) -> None:
        """Wait for something; AssertionError with the end of the log if the run is silent for too long or ends
        first."""
        life = Signs(self.folder)
        while not sign():
            told = self.log[-4000:] + self.words[-2000:]
            assert self.process.poll() is None, f"it ended with {self.process.returncode}:\n{told}"
            assert life.silent() < patience(SILENT_S), f"no sign of life for {SILENT_S:.0f} s:\n{told}"
            time.sleep(0.5)
        self.look()

    def ended(self) -> int:
        """Its exit code, once it has ended."""
        life = Signs(self.folder)
        while self.process.poll() is None and life.silent() < patience(SILENT_S):
            time.sleep(0.2)
        assert self.process.returncode is not None, f"it has not ended:\n{self.log[-4000:]}{self.words[-2000:]}"
        return self.process.returncode

    def left(self) -> list[str]:
        """Processes and segments that still exist after a moment."""
        end = time.monotonic() + patience(LEFT_S)
        while (found := self._left()) and time.monotonic() < end:
            time.sleep(0.5)
        return found

    def _left(self) -> list[str]:
        alive = [pid for pid, began in self.seen.items() if _stat(pid)[3] == began and _stat(pid)[0] != "Z"]
        return [
            *(f"{pid} {_command(pid)[:100]}" for pid in alive),
            *(path for path in self.segments if os.path.exists(path)),
        ]


@contextmanager
def under_way(folder: Path, *overrides: str, recipe: str = "quickstart", ranks: int = 1) -> Iterator[UnderWay]:
    """Start a run as a user would, or resume one (`recipe=""`); afterwards nothing of it is left."""
    words = [sys.executable, "-m", "tests.support.verl_cpu"]
    own = [recipe, f"run_dir={folder}", f"trainer.n_gpus_per_node={ranks}", f"model.path={folder.parent / 'model'}"]
    if recipe and not (folder.parent / "model").is_dir():
        model_in(folder.parent)
    words += [*own, *SMALL, *overrides] if recipe else ["--resume", str(folder), *overrides]
    run = UnderWay(folder, words)
    try:
        yield run
    finally:
        run.look()
        for pid in run.seen:
            if _stat(pid)[3] == run.seen[pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        run.process.wait()


def model_in(folder: Path) -> Path:
    """A new tiny model of the quickstart's language."""
    tokenizer = tiny_tokenizer(SlotsTask(rows_per_split=64).vocabulary())
    tiny_model(TinyConfig(hidden=32, layers=2, heads=2, mlp=64), tokenizer, 0).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return folder / "model"


def _all() -> list[int]:
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")]


def _stat(pid: int) -> tuple[str, int, int, str]:
    """State, parent, session, start time; zeros if the process is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", 0, 0, "gone"
    return fields[0], int(fields[1]), int(fields[3]), fields[19]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
