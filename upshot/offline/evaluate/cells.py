"""Lines of `rollouts.jsonl` → the cells of the table. Pure functions; missing scores are counted, never numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from upshot.offline.evaluate.statistics import Difference, Estimate, compare, estimate
from upshot.rewards.build import ARROW

Line = Mapping[str, Any]

SCALES = {"token_amount": 1e-3, "accuracy": 100.0, "bleu": 100.0, "pass_rate": 100.0, "interactivity": 100.0}
SCALES["action_accuracy"] = 100.0
"""The paper prints thousands of tokens and hundredths; other metrics are printed as they are."""
TITLES = {"token_amount": "k-tokens", "bleu": "BLEU", "pass_rate": "pass rate", "action_accuracy": "action accuracy"}


@dataclass(frozen=True)
class Column:
    """A metric, over all goals or over those of one group."""

    metric: str
    group: tuple[str, str] | None = None
    """(what, value), such as ('question', 'ambiguous')."""

    @property
    def title(self) -> str:
        """As the head of the column."""
        inner = self.metric.split(ARROW)[-1].strip()
        return TITLES.get(inner, inner) + (f" ({self.group[1]})" if self.group else "")

    @property
    def scale(self) -> float:
        """What a score is multiplied by for printing."""
        return SCALES.get(self.metric.split(ARROW)[-1].strip(), 1.0)


@dataclass(frozen=True)
class Cell:
    """What the table says about one model and one column, in the column's printed unit."""

    estimate: Estimate | None
    difference: Difference | None = None
    """Against the first row; None in the first row, and where no goal is scored for both."""
    missing: Mapping[str, int] = field(default_factory=dict)
    """Reason → how many conversations have no score."""


def columns_of(metrics: Sequence[str], lines: Sequence[Line], group: str | None = None) -> list[Column]:
    """The columns: the task metric (by group, too, if one is asked for), k-tokens, interactivity, then the rest."""
    task_metric, *others = metrics
    late = {"token_amount": 0, "interactivity": 1}
    rest = sorted(others, key=lambda name: late.get(name, 2))
    values = sorted({line["groups"][group] for line in lines if group in line.get("groups", {})}) if group else []
    return [
        Column(task_metric),
        *(Column(task_metric, (group, value)) for value in values if group),
        *map(Column, rest),
    ]


def cells(lines: Sequence[Line], models: Sequence[str], columns: Sequence[Column]) -> dict[str, list[Cell]]:
    """Per model its cells, compared with the first model's."""
    out: dict[str, list[Cell]] = {model: [] for model in models}
    for number, column in enumerate(columns):
        values = {model: _values(lines, model, column) for model in models}
        for model in models:
            present, absent = values[model]
            other = compare(present, values[models[0]][0], number) if model != models[0] else None
            found = estimate([present[goal] for goal in sorted(present)], number)  # whatever order they ended in
            out[model].append(
                Cell(
                    None if found is None else found.times(column.scale),
                    None if other is None else other.times(column.scale),
                    absent,
                )
            )
    return out


def _values(lines: Sequence[Line], model: str, column: Column) -> tuple[dict[str, float], dict[str, int]]:
    """(goal → value, reason → how many are missing) of one model and column."""
    present: dict[str, float] = {}
    absent: Counter[str] = Counter()
    for line in lines:
        if line["model"] != model:
            continue
        if column.group and line["groups"].get(column.group[0]) != column.group[1]:
            continue
        score = line["scores"].get(column.metric, {"missing": "not scored"})
        if score.get("value") is not None:
            present[line["row"]] = float(score["value"])
        else:
            absent[str(score.get("missing"))] += 1
    return present, dict(absent)
