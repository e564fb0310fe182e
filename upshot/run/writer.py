"""What a run writes: the lines of the run folder, the console, the trackers; and checkpoints, in a thread. No torch."""

from __future__ import annotations

import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from upshot.config.recipe import Recipe, TrainConfig
from upshot.core.files import to_json_value
from upshot.rollout.credit.rules import credit_rule
from upshot.rollout.reply import Rollout
from upshot.run.checkpoints import Checkpoints
from upshot.run.console import Reporter
from upshot.run.folder import RunFolder
from upshot.run.samples import Pieces
from upshot.run.trackers import Tracker
from upshot.tasks.base import Task, groups_of
from upshot.training.metrics.alarms import Alarms
from upshot.training.metrics.best import BestMark
from upshot.training.metrics.step import by_group, task_metrics

Logs = dict[str, float]
STEPS = 20
"""The time left is estimated from this many last steps."""
SAMPLES = 8
"""About this many replies of a phase are shown."""
STATUS_SECONDS = 1.0
"""Most often that status.json is written."""


@dataclass(eq=False)
class Writer:
    """Writes steps to the run folder and announces what was written."""

    recipe: Recipe
    folder: RunFolder
    reporter: Reporter
    task: Task
    pieces: Pieces
    """What each of a reply's token ids spells."""
    trackers: Sequence[Tracker] = ()
    _failing: set[str] = field(default_factory=set)
    """Trackers that have failed."""
    _now: dict[str, Any] = field(default_factory=dict)
    """What status.json says besides the state …"""
    _status_time: float = 0.0
    """… and when it was last written."""
    _seconds: deque[float] = field(default_factory=lambda: deque(maxlen=STEPS))
    """That the last steps took."""

    def begin(self, phase: str, steps: int, done: int) -> None:
        """A phase of `steps` steps begins, or continues after `done`."""
        self._seconds.clear()
        self._now = {"phase": phase, "step": done, "steps": steps}
        self.alarms = Alarms(credit_rule(self.recipe.credit).trains_futures)
        for line in self.folder.lines(phase):
            self.alarms.watch(line, line["step"])
        self.write_status("running")
        self.reporter.phase(phase, steps, done)

    def write_replies(self, step: int, groups: Sequence[Sequence[Rollout]]) -> Logs:
        """Write the replies of a step; what its line says of them by task and group."""
        replies = list(chain.from_iterable(groups))
        if not replies:
            return {}
        shown = replies[step % len(replies)]
        turns, total = shown.conversation.turns, shown.reward.total
        sampled = [place for place, turn in enumerate(turns) if turn.sample is not None]
        every = max(1, self._now.get("steps", 0) // SAMPLES)
        if sampled and (step == 1 or step % every == 0):  # at the first step, and SAMPLES times in the phase
            heard = turns[sampled[0] - 1].message.content if sampled[0] else ""
            reward = f"reward {total.value:.3g}" if total.value is not None else f"no reward ({total.reason})"
            self.reporter.show_reply(step, heard, turns[sampled[0]].message.content, reward)
        kept = replies[: self.recipe.keep_rollouts or None]
        self.folder.write_samples(step, kept, self.pieces)
        labels = [groups_of(self.task, reply.conversation.row) for reply in replies]
        lines = []
        for reply, groups_of_reply in zip(kept, labels, strict=False):
            try:
                lines.append(reply.to_dict(step, groups_of_reply, lambda ids: "".join(self.pieces(ids))))
            except Exception as error:  # of something in it that cannot be written; the run goes on
                self.reporter.say(f"a reply to row '{reply.conversation.row.id}' cannot be written: {error!r}")
        self.folder.append_rollouts(lines)
        return by_group(replies, labels) | task_metrics(groups, partial(groups_of, self.task))

    def announce(self, step: int, logs: Mapping[str, Any]) -> None:
        """Send what metrics.jsonl got to the console, the trackers and status.json; report alarms that begin."""
        for text in self.alarms.watch(logs, step):
            self.reporter.say(f"step {step}: {text}")
        phase, alarms = self._now["phase"], list(self.alarms.ringing.values())
        values = logs if {*map(type, logs.values())} == {float} else to_json_value(logs)
        numbers = {name: v for name, v in values.items() if isinstance(v, int | float) and abs(v) <= sys.float_info.max}
        if "time/step" in numbers:
            self._seconds.append(numbers["time/step"] + numbers.get("time/save", 0.0))
        left = (self._now["steps"] - step) * statistics.fmean(self._seconds or [0.0])
        self._now |= {"step": step, "eta_seconds": left, "alarms": alarms, "metrics": numbers}
        if time.monotonic() - self._status_time > STATUS_SECONDS:
            self._status_time = time.monotonic()
            self.folder.write_status("running", **self._now)
            self.folder.write_index()
        self.reporter.step(phase, step, numbers)
        if self.trackers:
            named = {f"{phase}/{name}": value for name, value in numbers.items()}
            self._to_trackers(lambda tracker: tracker.log(step, named))

    def write_status(self, state: str, **more: Any) -> None:
        """Say in status.json how the run stands."""
        self.folder.write_status(state, **self._now, **more)
        self.folder.write_index()

    def close(self) -> None:
        """Nothing more is written."""
        self._to_trackers(lambda tracker: tracker.finish())

    def _to_trackers(self, tell: Callable[[Tracker], None]) -> None:
        """A tracker that fails (full disk, lost server) is reported once and tried again: the run has its own files."""
        for tracker in self.trackers:
            name = type(tracker).__name__
            try:
                tell(tracker)
            except Exception as error:
                if name not in self._failing:
                    self.reporter.say(f"tracker {name} failed ({error!r}); the run continues, metrics.jsonl has all")
                self._failing.add(name)
            else:
                self._failing.discard(name)


class Saver:
    """Writes the checkpoints of a run in a thread, one at a time; what fails there is raised here."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        self.checkpoints = checkpoints
        self._pool = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[Path] | None = None
        self._last = time.monotonic()
        self._waited = 0.0

    def due(self, step: int, config: TrainConfig) -> bool:
        """Whether a checkpoint is to be saved after this step; raises what went wrong in the one before."""
        if self._writing is not None and self._writing.done():
            self.wait()
        if step >= config.steps:
            return False  # the phase's end saves
        by_steps = bool(config.save.every) and step % config.save.every == 0
        return by_steps or (bool(config.save.minutes) and time.monotonic() - self._last >= 60 * config.save.minutes)

    def save(
        self, phase: str, step: int, keep: int, copy: Callable[[], Callable[[Path], None]], best: BestMark | None = None
    ) -> None:
        """Copy what a checkpoint holds and have it written, after the previous one."""
        started = time.perf_counter()
        self.wait()
        self._writing = self._pool.submit(self.checkpoints.save, phase, step, keep, copy(), best)
        self._last = time.monotonic()
        self._waited += time.perf_counter() - started

    def wait(self) -> None:
        """Return when everything begun is on disk."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def spent(self) -> float:
        """Seconds that training stood still for checkpoints since the last call."""
        waited, self._waited = self._waited, 0.0
        return waited

    def close(self) -> None:
        """No more checkpoints."""
        self._pool.shutdown()
