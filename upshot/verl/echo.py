"""A run on verl, told to the person who started it: what verl's trainer writes into the run folder, as it comes."""

from __future__ import annotations

from upshot.core.files import parse_json_line
from upshot.run.folder import METRICS, RunFolder
from upshot.run.reporter import Reporter
from upshot.training.metrics.alarms import Alarms
from upshot.verl.checks.watchdog import MARK


class RunEcho:
    """Reads the lines of metrics.jsonl as they come, each once, and tells a reporter of them."""

    def __init__(self, folder: RunFolder, phase: str, reporter: Reporter) -> None:
        self.path = folder.path / METRICS
        self.phase = phase
        self.reporter = reporter
        self._alarms = Alarms()
        self._at = 0
        self._read(silent=True)

    def follow(self, said: str = "") -> None:
        """Tell the steps since the last call; `said`: a line of verl's, told where it is our watchdog's."""
        if MARK in said:
            self.reporter.say(said[said.index(MARK) :])
        self._read(silent=False)

    def _read(self, silent: bool) -> None:
        if not self.path.is_file() or self.path.stat().st_size <= self._at:
            return
        with self.path.open("rb") as file:
            file.seek(self._at)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]  # a line that is still being written waits
        self._at += len(whole)
        for line in map(parse_json_line, whole.split(b"\n")):
            if line is None or line.get("phase") != self.phase:
                continue
            step = int(line.pop("step"))
            begun = self._alarms.watch(line, step)
            if not silent:
                for text in begun:
                    self.reporter.say(f"step {step}: {text}")
                numbers = {name: value for name, value in line.items() if isinstance(value, int | float)}
                self.reporter.step(self.phase, step, numbers)
