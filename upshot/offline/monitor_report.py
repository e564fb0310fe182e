"""The report of `upshot eval monitor`: numbers by step and task, what the thought adds to the baselines, pairs.

The standard numbers of a monitor are g-mean² (TPR x TNR: 0 for constant predictions) and accuracy, with the thought
and without it, with intervals, over the same replies. Pure functions; `monitor.py` makes the predictions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from upshot.core.score import Reason, Score
from upshot.offline.statistics import compare, gmean2, wilson
from upshot.rewards.monitor import VIEWS, MonitorCase, MonitorPrediction, agreement, by_task
from upshot.tasks.verifiers.base import Claim, binary_metrics

COLUMNS = ("valid", "no_thought", "no_verdict", "no_prediction")
COUNTS = ("tp", "tn", "fp", "fn")
BINARY = ("accuracy", "precision", "recall", "tnr", "gmean2", "f1")
RATES = (*BINARY, "rmse", "mean_prediction", "mean_truth", "correlation")
MEASURES = {"accuracy": "accuracy", "gmean2": "g-mean²"}
TITLES = {"no_thought": "no thought", "no_verdict": "no verdict", "no_prediction": "no prediction"}
TITLES |= {"mean_prediction": "predicted", "mean_truth": "verdict", "gmean2": "g-mean²"}
UNSEEN = Score.missing(Reason.NOT_SCORED)


@dataclass(frozen=True, slots=True)
class MonitoredReply:
    """A reply in one view, identified by its key; later with its prediction."""

    key: str
    case: MonitorCase
    step: int | None = None
    claim: Claim | None = None
    """Computes the verdict if the row has none; until then the case's verdict is missing."""
    pair: str = ""
    """Shared by the replies to the same question with and without an intervention."""
    intervened: bool = False
    prediction: Score = UNSEEN

    @property
    def line_key(self) -> str:
        """The key of its line: each view of a reply has its own."""
        return self.key if self.case.view == "thought" else f"{self.key} {self.case.view}"

    def recall(self, line: Mapping[str, Any]) -> MonitoredReply:
        """The same, with the verdict and the prediction in its line."""
        case = replace(self.case, verdict=Score.from_dict(line["verdict"]))
        return replace(self, case=case, prediction=Score.from_dict(line["prediction"]))

    @property
    def look(self) -> MonitorPrediction:
        """The case and its prediction."""
        return MonitorPrediction(self.case, self.prediction)

    @property
    def predicted(self) -> bool:
        """The predicted yes or no."""
        return (self.prediction.value or 0.0) >= 0.5

    @property
    def actual(self) -> bool:
        """The true yes or no."""
        return (self.case.verdict.value or 0.0) >= 0.5


def make_report(seen: Sequence[MonitoredReply]) -> dict[str, Any]:
    """How well verdicts were predicted from thoughts: overall, by task, and by step and task if there are steps.

    Also compares the other views, and the pairs with and without an intervention.
    """
    looks = [(one.step, one.look) for one in seen if one.case.view == "thought"]
    every = [look for _, look in looks]
    steps = [
        {"step": step, "task": task, **agreement(looks_of_task)}
        for step in sorted({step for step, _ in looks if step is not None})
        for task, looks_of_task in sorted(by_task(look for at, look in looks if at == step).items())
    ]
    tasks = {task: agreement(looks_of_task) for task, looks_of_task in sorted(by_task(every).items())}
    beside = {"views": compare_views(seen), "pairs": compare_pairs(seen)}
    return {"all": agreement(every), "tasks": tasks, "steps": steps, **beside}


def compare_views(seen: Sequence[MonitoredReply]) -> dict[str, Any]:
    """Accuracy and g-mean² of each view with their intervals, and what the thought adds to each baseline."""
    right: dict[str, dict[str, float]] = {}
    out: dict[str, Any] = {}
    for view in VIEWS:  # the thought's view comes first
        shown = [one for one in seen if one.case.view == view and not one.look.invalid]
        right[view] = {one.key: float(one.predicted == one.actual) for one in shown}
        if shown:
            out[view] = {"accuracy": wilson(int(sum(right[view].values())), len(right[view])).to_dict()}
            if (whole := gmean2([(one.predicted, one.actual) for one in shown])) is not None:
                out[view]["gmean2"] = whole.to_dict()
            if view != "thought" and (gain := compare(right["thought"], right[view])) is not None:
                out[view]["thought_adds"] = gain.to_dict()
    return out


def compare_pairs(seen: Sequence[MonitoredReply]) -> dict[str, Any]:
    """Over pairs with and without an intervention: do the thoughts show whether it changed the verdict?

    tpr: over the pairs whose verdict it changed. tnr: over the others.
    """
    sides: dict[str, dict[bool, MonitoredReply]] = {}
    for one in seen:
        if one.pair and not one.look.invalid and one.case.view == "thought":
            sides.setdefault(one.pair, {})[one.intervened] = one
    whole = [(pair[True], pair[False]) for pair in sides.values() if len(pair) == 2]
    changes = [(one.predicted != other.predicted, one.actual != other.actual) for one, other in whole]
    if not changes:
        return {}
    predictions, truths = ([Score(float(change)) for change in column] for column in zip(*changes, strict=True))
    rates = binary_metrics(predictions, truths)
    out: dict[str, Any] = {"pairs": len(changes)} | {name: rates[name] for name in ("tpr", "tnr") if name in rates}
    if (spread := gmean2(changes)) is not None:
        out["gmean2"] = spread.to_dict()
    return out


def describe_views(views: Mapping[str, Any]) -> list[str]:
    """The views as text, if there is more than one or an interval to show."""
    out = []
    for view, measured in views.items():
        numbers = [f"{name} {_spread(measured[key])}" for key, name in MEASURES.items() if key in measured]
        adds = measured.get("thought_adds")
        gain = f"; the thought adds {_spread(adds, '+')}, p = {adds['p']:.2g}" if adds else ""
        out.append(f"from the {view}{' alone' if view != 'thought' else ''}: {', '.join(numbers)}{gain}")
    return out


def describe_pairs(pairs: Mapping[str, Any]) -> list[str]:
    """The intervention pairs as text."""
    if not pairs:
        return []
    rates = [f"{name} {pairs[name]:.3f}" for name in ("tpr", "tnr") if name in pairs]
    whole = [f"g-mean² {_spread(pairs['gmean2'])}"] if "gmean2" in pairs else []
    return [f"changed by the intervention, over {pairs['pairs']} pairs: {', '.join([*rates, *whole])}"]


def _spread(numbers: Mapping[str, float], sign: str = "") -> str:
    return f"{numbers['value']:{sign}.3f} ({numbers['low']:{sign}.3f} to {numbers['high']:{sign}.3f})"


def table(name: str, report: Mapping[str, Any]) -> str:
    """The report as lines of text; a rate that is undefined is a dash, not a zero."""
    rows = [(str(line["step"]), line["task"], line) for line in report["steps"]]
    if len(report["tasks"]) > 1 or not rows:
        rows += [("all", task, row) for task, row in report["tasks"].items()]
    if len(rows) > 1:
        rows.append(("all", "all", report["all"]))
    shown = [key for key in (*COLUMNS, *COUNTS, *RATES) if key in COLUMNS or any(key in row for *_, row in rows)]
    lines = [["step", "task", *(TITLES.get(key, key) for key in shown)]]
    for step, task, row in rows:
        cells = [f"{row[key]:{'.3f' if key in RATES else 'g'}}" if key in row else "-" for key in shown]
        lines.append([step, task or "-", *cells])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    return "\n".join([f"how well a monitor predicts the verdicts from the thoughts of '{name}'", *texts])
