"""Notices that a run is stuck, says what it waits for, and ends it only if a limit is set."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from upshot.core.errors import UserError, reason_of

MARK = "upshot watchdog: "
"""Prefix of our own lines, so that they do not count as a sign of life."""
TAIL = 65_536
"""How many bytes at the end of the log are read."""


@dataclass(frozen=True)
class Patience:
    """When a run counts as stuck."""

    silent_s: float = 120.0
    """Seconds without a new line in the log; ten times as long without a step counts as well."""
    end_after_s: float | None = None
    """Seconds without a step after which the run is ended; None: never, it is only reported."""
    grace_s: float = 20.0
    """Seconds after SIGTERM in which the current step may end and be saved (read by the command itself)."""

    @classmethod
    def of(cls, config: Any) -> Patience:
        """The settings in the section `upshot` of verl's config, which is ours."""
        settings = (config.get("upshot") or {}).get("watch") or {}
        known = set(cls.__dataclass_fields__)
        if unknown := set(settings) - known:
            raise UserError(f"upshot.watch has no key '{min(unknown)}'; known: {', '.join(sorted(known))}")
        return cls(**{name: settings[name] for name in known & set(settings)})


class _Sign:
    """A sign of life, and since when it has not changed."""

    def __init__(self, look: Callable[[], Any], clock: Callable[[], float]) -> None:
        self.look, self.clock = look, clock
        self.seen, self.since = look(), clock()
        self.reported = 0.0
        """For how long it had not changed when that was reported last."""

    def still(self) -> float:
        """Seconds since the last change."""
        now, seen = self.clock(), self.look()
        if seen != self.seen:
            self.seen, self.since, self.reported = seen, now, 0.0
        return now - self.since

    def due(self, every: float) -> bool:
        """Whether it is time to report this, or to report it again."""
        still = self.still()
        if still - self.reported < every:
            return False
        self.reported = still
        return True


@dataclass
class Watchdog:
    """Watches the log and the steps of a run; `waits_for` returns what the cluster waits for."""

    log: Path
    steps: Path
    waits_for: Callable[[], Sequence[str]]
    say: Callable[[str], None] = print
    patience: Patience = field(default_factory=Patience)
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._line = _Sign(lambda: last_line(self.log), self.clock)
        self._step = _Sign(lambda: size_of(self.steps), self.clock)

    def look(self) -> None:
        """Report what is stuck, if something is; `UserError` when the limit is reached."""
        patience = self.patience
        silent = self._line.due(patience.silent_s)
        slow = self._step.due(10 * patience.silent_s)
        still = self._step.still()
        over = patience.end_after_s is not None and still > patience.end_after_s
        if not (silent or slow or over):
            return
        what = f"no new line for {self._line.still():.0f} s" if silent else f"no step for {still:.0f} s"
        for line in [f"{what}; the last one: {self._line.seen or 'none'}", *self._waits_for()]:
            self.say(MARK + line)
        if over:
            raise UserError(
                f"no step for {still:.0f} s, and upshot.watch.end_after_s is {patience.end_after_s:g}; what it waited "
                f"for is shown above and in {self.log.name}"
            )

    def _waits_for(self) -> Sequence[str]:
        try:
            return self.waits_for()
        except Exception as error:  # a report must not end the run
            return [f"what it waits for is unknown ({reason_of(error)})"]


def last_line(path: Path) -> str:
    """The last line of a log that we did not write."""
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, size_of(path) - TAIL))
        lines = file.read().decode(errors="replace").splitlines()
    return next((line.strip()[:300] for line in reversed(lines) if line.strip() and MARK not in line), "")


def size_of(path: Path) -> int:
    """The size of a file in bytes; 0 if it does not exist."""
    return path.stat().st_size if path.is_file() else 0


def describe_demands(
    groups: Sequence[Mapping[str, Any]], asked: Sequence[tuple[Mapping[str, float], int]]
) -> list[str]:
    """Placement groups and requests that Ray cannot place, as text."""
    lines = [
        f"Ray cannot place the group '{group['name']}': {_add_up(list(group['bundles'].values()))} together on one node"
        for group in groups
        if group["state"] in ("PENDING", "RESCHEDULING")
    ]
    lines += [f"Ray cannot place {count} task(s) or actor(s) that need {_describe(need)}" for need, count in asked]
    return lines


def _add_up(bundles: Sequence[Mapping[str, float]]) -> str:
    names = sorted({name for bundle in bundles for name in bundle})
    return _describe({name: sum(bundle.get(name, 0) for bundle in bundles) for name in names})


def _describe(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{value:g} {name}" for name, value in sorted(resources.items())) or "nothing"
