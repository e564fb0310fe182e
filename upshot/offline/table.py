"""Lines of `rollouts.jsonl` → the paper's table: its cells, printed for a terminal, as Markdown and as JSON.

Pure functions. Missing scores are counted; they are never numbers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from upshot.offline.statistics import Difference, Estimate, compare, estimate, macro
from upshot.rewards.build import ARROW
from upshot.run.console import print_rows

Line = Mapping[str, Any]
TOKENS = "token_amount"
SCALES = {TOKENS: 1e-3, **dict.fromkeys(("accuracy", "bleu", "pass_rate", "interactivity"), 100.0)}
SCALES |= {"action_accuracy": 100.0, "verifier": 100.0}
"""The paper prints thousands of tokens and hundredths; other metrics are printed as they are."""
TITLES = {"token_amount": "k-tokens", "bleu": "BLEU", "pass_rate": "pass rate", "action_accuracy": "action accuracy"}
NOTE = (
    "mean [95 % interval over goals: bootstrap, Wilson for scores of 0 and 1]; p: paired sign-flip test against the "
    "first row, two-sided, * p < 0.05, ** p < 0.01 (not corrected for the number of comparisons)"
)


@dataclass(frozen=True)
class Column:
    """A metric, over all goals or over those of one group."""

    metric: str
    group: tuple[str, str] | None = None
    """(what, value), such as ('question', 'ambiguous')."""
    macro: str = ""
    """accuracy or F1: the mean over the two values of a group, each counting the same."""

    @property
    def inner(self) -> str:
        """The metric without the artefact before its arrow."""
        return self.metric.split(ARROW)[-1].strip()

    @property
    def title(self) -> str:
        """The head of the column."""
        if self.macro:
            return f"macro {self.macro}"
        return TITLES.get(self.inner, self.inner) + (f" ({self.group[1]})" if self.group else "")


@dataclass(frozen=True)
class Cell:
    """One model's value in one column, in the column's printed unit."""

    estimate: Estimate | None
    difference: Difference | None = None
    """The difference from the first row; None in the first row, and if no goal is scored for both."""
    missing: Mapping[str, int] = field(default_factory=dict)
    """Reason → how many conversations have no score."""

    @property
    def text(self) -> str:
        """'46.0 [40.1, 52.3] p=0.031*', followed by the number of missing scores."""
        absent = sum(self.missing.values())
        tail = f" ({absent} missing)" if absent else ""
        if self.estimate is None:
            return f"–{tail}"
        mean, low, high = map(_short, (self.estimate.mean, self.estimate.low, self.estimate.high))
        text = f"{mean} [{low}, {high}]"
        if self.difference is not None:
            p = self.difference.p_value
            text += f" p{'<0.001' if p < 0.001 else f'={p:.3f}'}{'**' if p < 0.01 else '*' if p < 0.05 else ''}"
        return text + tail

    def to_dict(self) -> dict[str, Any]:
        """Every number of it."""
        out: dict[str, Any] = {"missing": dict(self.missing)}
        if self.estimate is not None:
            out |= self.estimate.to_dict("mean")
        if self.difference is not None:
            out["difference"] = {**self.difference.estimate.to_dict("mean"), "p": self.difference.p_value}
        return out


Cells = Mapping[str, Sequence[Cell]]


def _short(value: float) -> str:
    if 0 < abs(value) < 0.1:
        return f"{value:.2g}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def make_columns(metrics: Sequence[str], lines: Sequence[Line], group: str | None = None) -> list[Column]:
    """The columns: the task metric (also by group, if one is given), k-tokens, interactivity, then the rest."""
    task_metric, *others = metrics
    late = {"token_amount": 0, "interactivity": 1}
    rest = sorted(others, key=lambda name: late.get(name, 2))
    values = sorted({line["groups"][group] for line in lines if group in line.get("groups", {})}) if group else []
    return [
        Column(task_metric),
        *(Column(task_metric, (group, value)) for value in values if group),
        *(Column(task_metric, (group, values[0]), one) for one in ("accuracy", "F1") if group and len(values) == 2),
        *map(Column, rest),
    ]


def make_cells(
    lines: Sequence[Line], models: Sequence[str], columns: Sequence[Column], scales: Mapping[str, float] = SCALES
) -> dict[str, list[Cell]]:
    """The cells of each model, compared with the first model's; scales: metric → the factor for printing."""
    out: dict[str, list[Cell]] = {model: [] for model in models}
    for number, column in enumerate(columns):
        scale = scales.get(column.inner, 1.0)
        if column.macro:
            for model in models:
                out[model].append(Cell(_macro(lines, model, column, number)))
            continue
        values = {model: _values(lines, model, column) for model in models}
        for model in models:
            present, absent = values[model]
            other = compare(present, values[models[0]][0], number) if model != models[0] else None
            mean = estimate([present[goal] for goal in sorted(present)], number)  # in an order that is always the same
            out[model].append(Cell(mean and mean.times(scale), other and other.times(scale), absent))
    return out


def _macro(lines: Sequence[Line], model: str, column: Column, seed: int) -> Estimate | None:
    """Macro accuracy or F1 over the two classes, × 100."""
    assert column.group is not None
    pairs = [
        (score["value"] == 1.0, line["groups"].get(column.group[0]) == column.group[1])
        for line in lines
        if line["model"] == model and (score := line["scores"].get(column.metric, {})).get("value") is not None
    ]
    mean = macro(pairs, column.macro == "F1", seed)
    return mean and mean.times(100.0)


def _values(lines: Sequence[Line], model: str, column: Column) -> tuple[dict[str, float], dict[str, int]]:
    """(goal → value, reason → how many are missing) of one model and column; several tries of a goal are its mean."""
    present: dict[str, list[float]] = {}
    absent: Counter[str] = Counter()
    for line in lines:
        if line["model"] != model:
            continue
        if column.group and line["groups"].get(column.group[0]) != column.group[1]:
            continue
        score = line["scores"].get(column.metric, {"missing": "not scored"})
        if score.get("value") is not None:
            present.setdefault(line["row"], []).append(float(score["value"]))
        else:
            absent[str(score.get("missing"))] += 1
    return {row: math.fsum(values) / len(values) for row, values in present.items()}, dict(absent)


def missing_lines(columns: Sequence[Column], cells: Cells) -> list[str]:
    """Missing scores by model and reason; columns that miss the same conversations are not listed twice."""
    counts: Counter[tuple[str, str]] = Counter()
    for model, row in cells.items():
        for column, cell in zip(columns, row, strict=True):
            for reason, count in cell.missing.items():
                if column.group is None:
                    counts[model, reason] = max(counts[model, reason], count)
    return [f"{model}: {count} × {reason}" for (model, reason), count in counts.most_common()]


def markdown(columns: Sequence[Column], cells: Cells) -> str:
    """The table as Markdown."""
    head = ["", *(column.title for column in columns)]
    lines = [head, ["---"] * len(head), *([model, *(cell.text for cell in row)] for model, row in cells.items())]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    missing = "".join(f"- missing: {line}\n" for line in missing_lines(columns, cells))
    return f"{table}\n\n{NOTE}\n" + (f"\n{missing}" if missing else "")


def print_table(title: str, columns: Sequence[Column], cells: Cells, last: str = "") -> None:
    """The table on a terminal, and a last line below it."""
    rows = [[model, *(cell.text for cell in row)] for model, row in cells.items()]
    console = print_rows(["", *(column.title for column in columns)], rows, title)
    console.print(NOTE, style="dim")
    for line in missing_lines(columns, cells):
        console.print(f"missing: {line}", style="yellow", highlight=False)
    console.print(last, highlight=False, soft_wrap=True)


def table_to_dict(title: str, columns: Sequence[Column], cells: Cells) -> dict[str, Any]:
    """`table.json`: the printed table (`columns`, `rows`), and every number behind it (`cells`)."""
    titles = [column.title for column in columns]
    return {
        "title": title,
        "columns": ["", *titles],
        "rows": [[model, *(cell.text for cell in row)] for model, row in cells.items()],
        "note": NOTE,
        "cells": {model: dict(zip(titles, [c.to_dict() for c in row], strict=True)) for model, row in cells.items()},
    }
