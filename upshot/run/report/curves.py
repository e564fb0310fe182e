"""`metrics.jsonl` → curves small enough to embed.

A null is a missing point: it stays in the curve as a gap and is counted. A key that a row lacks was simply not logged
at that step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from upshot.run.report.lines import LogTail, number, shorten

NOT_METRICS = {"step", "phase"}

Point = tuple[float, float | None]
Sums = Mapping[tuple[str, float], float]
Points = dict[str, dict[str, dict[float, float | None]]]


class Curves:
    """All numeric metrics of one run, by phase and key; grows with its log."""

    def __init__(self, path: Path) -> None:
        self.log = LogTail(path)
        self._clear()

    def _clear(self) -> None:
        self.rows = 0
        self.last_steps: dict[str, float] = {}
        """The last step of each phase: they count anew."""
        self.rewritten = 0
        """Points logged again for the same phase and step (a resumed run); the later value is kept."""
        self.not_finite = 0
        """Values that were NaN or infinite; shown as missing."""
        self._points: Points = defaultdict(lambda: defaultdict(dict))

    def follow(self) -> bool:
        """Read what the log has more; whether that is anything."""
        before = self.rows
        again = self.log.is_rewritten()
        if again:
            self._clear()
        for _, _, row in self.log.read():
            self._add(row)
        return again or self.rows != before

    def _add(self, row: dict[str, Any]) -> None:
        step = number(row.get("step"))
        if step is None:
            step = float(self.rows)
        self.rows += 1
        phase = str(row.get("phase") or "")
        self.last_steps[phase] = max(step, self.last_steps.get(phase, step))
        of_phase = self._points[phase]
        for key, cell in row.items():
            if key in NOT_METRICS or not (cell is None or isinstance(cell, int | float)):
                continue
            value = number(cell)
            self.not_finite += value is None and cell is not None
            self.rewritten += step in of_phase[key]
            of_phase[key][step] = value

    @property
    def series(self) -> dict[str, dict[str, list[Point]]]:
        """Phase → key → points in step order."""
        return {
            phase: {key: sorted((_zeros(key, keys) | by_step).items()) for key, by_step in keys.items()}
            for phase, keys in self._points.items()
        }

    def last(self, key: str) -> float | None:
        """The newest value of a metric that is not missing; None when there is none."""
        return next(reversed(self._values(key)), None)

    def best(self, key: str) -> float | None:
        """The best value of a metric: of a loss the lowest, else the highest."""
        return (min if "loss/" in key else max)(self._values(key), default=None)

    def names(self) -> list[tuple[str, str]]:
        """Every curve as (phase, key)."""
        return [(phase, key) for phase, of_phase in self._points.items() for key in of_phase]

    def total(self, key: str) -> float | None:
        """The sum of a metric over all steps and phases; None when it was never logged."""
        return sum(values) if (values := self._values(key)) else None

    def _values(self, key: str) -> list[float]:
        return [value for keys in self._points.values() for value in keys.get(key, {}).values() if value is not None]

    def sums(self, key: str) -> dict[tuple[str, float], float]:
        """(phase, step) → the sum of a metric up to there, phase after phase; of phases that log it."""
        total, out = 0.0, {}
        for phase, keys in self._points.items():
            for step in sorted({step for points in keys.values() for step in points}) if key in keys else ():
                total += keys[key].get(step) or 0.0
                out[phase, step] = total
        return out

    def missing_reasons(self) -> dict[str, float]:
        """How often each reason of the `missing/<reason>` metrics was counted in the whole run, most frequent first."""
        keys = sorted({key for keys in self._points.values() for key in keys if key.startswith("missing/")})
        totals = {key.removeprefix("missing/"): self.total(key) for key in keys}
        counted = {reason: total for reason, total in totals.items() if total}
        return dict(sorted(counted.items(), key=lambda item: -item[1]))


def read_curves(path: Path) -> Curves:
    """Read a metrics file."""
    curves = Curves(path)
    curves.follow()
    return curves


def _zeros(key: str, keys: Mapping[str, Mapping[float, float | None]]) -> dict[float, float | None]:
    """Zero where nothing was missing: `missing/<reason>` counts are logged only at steps where the reason occurred."""
    return dict.fromkeys(keys.get("reward/missing", ()), 0.0) if key.startswith("missing/") else {}


def thin(points: Sequence[Point], limit: int) -> list[Point]:
    """At most about `limit` points: both ends, and of every stretch its lowest, its highest and one missing point."""
    if len(points) <= limit:
        return list(points)
    stretches = max(1, (limit - 2) // 3)
    kept: set[int] = {0, len(points) - 1}
    for stretch in range(stretches):
        span = range(stretch * len(points) // stretches, (stretch + 1) * len(points) // stretches)
        present = [(value, index) for index in span if (value := points[index][1]) is not None]
        absent = next((index for index in span if points[index][1] is None), None)
        if present:
            kept |= {min(present)[1], max(present)[1]}
        if absent is not None:
            kept.add(absent)
    return [points[index] for index in sorted(kept)]


def pack(series: Iterable[tuple[str, str, list[Point]]], limit: int, axes: Mapping[str, Sums]) -> dict[str, Any]:
    """Curves as JSON, thinned, with equal step columns stored once, and beside each what else curves are drawn over."""
    columns: dict[tuple[str, tuple[float | int, ...]], int] = {}
    packed = []
    for phase, key, points in series:
        kept = thin(points, limit)
        steps = tuple(shorten(step) for step, _ in kept)
        y = [None if value is None else shorten(value) for _, value in kept]
        curve = {"phase": phase, "key": key, "x": columns.setdefault((phase, steps), len(columns)), "y": y}
        packed.append(curve | {"n": len(points), "missing": sum(value is None for _, value in points)})
    places = [[(phase, step) for step in steps] for phase, steps in columns]
    beside = {
        name: [[shorten(sums[place]) if place in sums else None for place in column] for column in places]
        for name, sums in axes.items()
    }
    return {"steps": [list(steps) for _, steps in columns], "curves": packed} | beside
