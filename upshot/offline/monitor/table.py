"""A monitor's looks as numbers and as a table, by step and task. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from upshot.rewards.monitor import MonitorPrediction, agreement, group_by

COLUMNS = ("valid", "no_thought", "no_verdict", "no_prediction")
COUNTS = ("tp", "tn", "fp", "fn")
RATES = ("accuracy", "precision", "recall", "tnr", "f1", "rmse", "mean_prediction", "mean_truth", "correlation")
SHORT = {"no_thought": "no thought", "no_verdict": "no verdict", "no_prediction": "no prediction"}
SHORT |= {"mean_prediction": "predicted", "mean_truth": "verdict"}


def report(looks: Sequence[tuple[int | None, MonitorPrediction]]) -> dict[str, Any]:
    """Over all looks, by task, and by step and task where the replies have steps."""
    every = [look for _, look in looks]
    steps = [
        {"step": step, "task": task, **agreement(own)}
        for step in sorted({step for step, _ in looks if step is not None})
        for task, own in _by_task([look for at, look in looks if at == step]).items()
    ]
    tasks = {task: agreement(own) for task, own in _by_task(every).items()}
    return {"all": agreement(every), "tasks": tasks, "steps": steps}


def _by_task(looks: Sequence[MonitorPrediction]) -> dict[str, list[MonitorPrediction]]:
    return dict(sorted(group_by(looks, lambda look: look.case.task).items()))


def table(name: str, found: Mapping[str, Any]) -> str:
    """The report as lines of text."""
    rows = [(str(line["step"]), line["task"], line) for line in found["steps"]]
    if len(found["tasks"]) > 1 or not rows:
        rows += [("all", task, numbers) for task, numbers in found["tasks"].items()]
    if len(rows) > 1:
        rows.append(("all", "all", found["all"]))
    shown = [key for key in (*COLUMNS, *COUNTS, *RATES) if key in COLUMNS or any(key in own for *_, own in rows)]
    lines = [["step", "task", *(SHORT.get(key, key) for key in shown)]]
    lines += [[step, task or "-", *(_cell(numbers, key) for key in shown)] for step, task, numbers in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    return "\n".join([f"how well a monitor predicts the verdicts from the thoughts of '{name}'", *texts])


def _cell(numbers: Mapping[str, float], key: str) -> str:
    """A number; a rate that is undefined is a dash, not a zero."""
    if key not in numbers:
        return "-"
    return f"{numbers[key]:.3f}" if key in RATES else f"{numbers[key]:g}"
