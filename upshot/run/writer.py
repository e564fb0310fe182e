"""Telling what a run does: the lines of the run folder, the console, the trackers. No torch."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from upshot.config.recipe import Recipe
from upshot.core.files import to_json_value
from upshot.rollout.rollout import Rollout
from upshot.run.folder import RunFolder
from upshot.run.reporter import Reporter
from upshot.run.trackers import Tracker
from upshot.tasks.base import Task, groups_of
from upshot.training.metrics.step import by_group
from upshot.training.metrics.task import task_metrics

Logs = dict[str, float]
STEPS = 20
"""The time left is reckoned by so many last steps."""
STATUS_SECONDS = 1.0
"""Most often that status.json is written."""


class Writer:
    """Writes steps to the run folder and announces what was written."""

    def __init__(
        self,
        recipe: Recipe,
        folder: RunFolder,
        reporter: Reporter,
        task: Task,
        spell: Callable[[Sequence[int]], str],
        trackers: Sequence[Tracker] = (),
    ) -> None:
        self.keep_rollouts = recipe.keep_rollouts
        self.folder = folder
        self.reporter = reporter
        self.task = task
        self.spell = spell
        """Token ids → text."""
        self.trackers = trackers
        self._failing: set[str] = set()
        self._now: dict[str, Any] = {}
        """What status.json says besides the state."""
        self._steps = 0
        self._took: deque[float] = deque(maxlen=STEPS)
        self._told = 0.0

    def begin(self, phase: str, steps: int, done: int) -> None:
        """A phase of so many steps begins, or goes on after `done`."""
        self._steps = steps
        self._took.clear()
        self._now = {"phase": phase, "step": done, "steps": steps}
        self.status("running")
        self.reporter.phase(phase, steps, done)

    def replies(self, step: int, groups: Sequence[Sequence[Rollout]]) -> Logs:
        """Write the replies of a step; what its line says of them by task and group."""
        replies = [reply for group in groups for reply in group]
        if not replies:
            return {}
        kept = replies[: self.keep_rollouts or None]
        self.folder.samples(step, kept)
        self.folder.rollouts(self._transcripts(step, kept))
        return by_group(replies, self._groups_of, lambda reply: reply.reward.total) | task_metrics(
            groups, self.task.groups
        )

    def line(self, phase: str, step: int, logs: Mapping[str, Any]) -> None:
        """Write the line of a step."""
        self.folder.metrics(phase, step, logs)

    def announce(self, phase: str, step: int, logs: Mapping[str, Any], alarms: Sequence[str] = ()) -> None:
        """Tell the console, the trackers and status.json what metrics.jsonl has been told."""
        numbers = {name: value for name, value in to_json_value(logs).items() if isinstance(value, (int, float))}
        if "time/step" in numbers:
            self._took.append(numbers["time/step"] + numbers.get("time/save", 0.0))
        left = (self._steps - step) * statistics.fmean(self._took or [0.0])
        self._now |= {"step": step, "eta_seconds": left, "alarms": list(alarms), "metrics": numbers}
        if time.monotonic() - self._told > STATUS_SECONDS:
            self.status("running")
        self.reporter.step(phase, step, numbers)
        named = {f"{phase}/{name}": value for name, value in numbers.items()}
        self._to_trackers(lambda tracker: tracker.log(step, named))

    def status(self, state: str, **more: Any) -> None:
        """Say in status.json how the run stands."""
        self._told = time.monotonic()
        self.folder.status(state, **self._now, **more)

    def close(self) -> None:
        """Nothing more is written."""
        self._to_trackers(lambda tracker: tracker.finish())

    def _to_trackers(self, tell: Callable[[Tracker], None]) -> None:
        """One that fails (a full disk, a server away) is said once and told again: the run has its own files."""
        for tracker in self.trackers:
            name = type(tracker).__name__
            try:
                tell(tracker)
            except Exception as error:
                if name not in self._failing:
                    self.reporter.say(
                        f"the tracker {name} fails ({error!r}); the run goes on, metrics.jsonl has it all"
                    )
                self._failing.add(name)
            else:
                self._failing.discard(name)

    def _transcripts(self, step: int, replies: Sequence[Rollout]) -> Iterator[dict[str, Any]]:
        """Lines for rollouts.jsonl; a reply that cannot be written (a detail that is no mapping) is said, not fatal."""
        for reply in replies:
            try:
                yield reply.to_dict(step, self._groups_of(reply), self.spell)
            except Exception as error:
                self.reporter.say(f"a reply to row '{reply.conversation.row.id}' cannot be written: {error!r}")

    def _groups_of(self, reply: Rollout) -> Mapping[str, str]:
        return groups_of(self.task, reply.conversation.row)
