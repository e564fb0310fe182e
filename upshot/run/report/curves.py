"""`metrics.jsonl` → curves small enough to embed.

A null is a missing point: it stays in the curve as a gap and is counted. A key that a row lacks was simply not logged
at that step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from upshot.run.report.lines import SkippedLines, number, read_objects, shorten

NOT_METRICS = {"step", "phase"}

Point = tuple[float, float | None]


@dataclass(slots=True)
class Curves:
    """All numeric metrics of one run: phase → key → points in step order."""

    series: dict[str, dict[str, list[Point]]] = field(default_factory=dict)
    rows: int = 0
    last_steps: dict[str, float] = field(default_factory=dict)
    """The last step of each phase: they count anew."""
    rewritten: int = 0
    """Points logged again for the same phase and step (a resumed run); the later value is kept."""
    not_finite: int = 0
    """Values that were NaN or infinite; shown as missing."""
    skipped: SkippedLines = field(default_factory=SkippedLines)

    def names(self) -> list[tuple[str, str]]:
        """Every curve as (phase, key)."""
        return [(phase, key) for phase, of_phase in self.series.items() for key in of_phase]

    def total(self, key: str) -> float | None:
        """The sum of a metric over all steps and phases; None when it was never logged."""
        found = [value for keys in self.series.values() for _, value in keys.get(key, []) if value is not None]
        return sum(found) if found else None

    def missing_reasons(self) -> dict[str, float]:
        """How often each reason of the `missing/<reason>` metrics was counted in the whole run, most frequent first."""
        keys = sorted({key for keys in self.series.values() for key in keys if key.startswith("missing/")})
        totals = {key.removeprefix("missing/"): self.total(key) for key in keys}
        counted = {reason: total for reason, total in totals.items() if total}
        return dict(sorted(counted.items(), key=lambda item: -item[1]))


def read_curves(path: Path) -> Curves:
    """Read a metrics file."""
    curves = Curves()
    points: dict[str, dict[str, dict[float, float | None]]] = defaultdict(lambda: defaultdict(dict))
    for _, _, row in read_objects(path, curves.skipped):
        step = number(row.get("step"))
        if step is None:
            step = float(curves.rows)
        curves.rows += 1
        phase = str(row.get("phase") or "")
        curves.last_steps[phase] = max(step, curves.last_steps.get(phase, step))
        of_phase = points[phase]
        for key, cell in row.items():
            if key in NOT_METRICS or not _is_metric(cell):
                continue
            value = number(cell)
            curves.not_finite += value is None and cell is not None
            curves.rewritten += step in of_phase[key]
            of_phase[key][step] = value
    _fill_counts(points)
    curves.series = {
        phase: {key: sorted(by_step.items()) for key, by_step in keys.items()} for phase, keys in points.items()
    }
    return curves


def _fill_counts(points: dict[str, dict[str, dict[float, float | None]]]) -> None:
    """Zero where nothing was missing: `missing/<reason>` counts are logged only at steps where the reason occurred."""
    for of_phase in points.values():
        counted = of_phase.get("reward/missing", {})
        for key in of_phase:
            if key.startswith("missing/"):
                of_phase[key].update({step: 0.0 for step in counted if step not in of_phase[key]})


def _is_metric(cell: Any) -> bool:
    return cell is None or isinstance(cell, int | float)


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


def pack(series: Iterable[tuple[str, str, list[Point]]], limit: int) -> dict[str, Any]:
    """Curves as JSON, thinned, with equal step columns stored once."""
    columns: dict[tuple[float | int, ...], int] = {}
    packed = []
    for phase, key, points in series:
        kept = thin(points, limit)
        steps = tuple(shorten(step) for step, _ in kept)
        curve = {
            "phase": phase,
            "key": key,
            "x": columns.setdefault(steps, len(columns)),
            "y": [None if value is None else shorten(value) for _, value in kept],
            "n": len(points),
            "missing": sum(value is None for _, value in points),
        }
        packed.append(curve)
    return {"steps": [list(steps) for steps in columns], "curves": packed}
