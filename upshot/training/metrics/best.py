"""Which evaluation was the best, and how many came since: a pure function of the lines of metrics.jsonl. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from upshot.config.method import method_of
from upshot.config.recipe import Recipe
from upshot.core.errors import UserError, did_you_mean
from upshot.rewards.build import metric_labels

ONLY = ("eval/", "time/eval")
"""What a line of nothing but an evaluation has."""
HELD_OUT: tuple[str, ...] = ("reward/", "metric/", "missing/", "part/", "classmate/")
HELD_OUT += ("rollout/reply_tokens", "rollout/turns", "rollout/future_turns", "task/pass@")
"""What is logged of held-out replies, by how the names begin."""


def best_metric(recipe: Recipe) -> str | None:
    """What makes a checkpoint the best one; None where none is kept as such."""
    wanted = recipe.train.save.best
    if wanted != "auto":
        return wanted
    return method_of(recipe.train.method).best_metric if recipe.eval.every else None


class BestMark(NamedTuple):
    """What an evaluation said of the best model so far."""

    metric: str
    value: float


class BestTracker:
    """The values of one metric, by the step whose model was evaluated."""

    def __init__(self, metric: str) -> None:
        words = metric.split()
        self.metric = words[-1]
        self.smallest = words[0] == "min" or (len(words) == 1 and "loss/" in self.metric)
        self.values: dict[int, float] = {}

    @classmethod
    def from_lines(cls, recipe: Recipe, lines: Iterable[Mapping[str, Any]]) -> BestTracker:
        """A tracker of the run's metric, with the evaluations in its lines."""
        tracker = cls(best_metric(recipe) or method_of(recipe.train.method).best_metric)
        for line in lines:
            tracker.add(evaluated_step(line), line)
        return tracker

    def add(self, step: int, logs: Mapping[str, Any]) -> BestMark | None:
        """Take note of an evaluation; when it is the best one so far, what it says."""
        value = logs.get(self.metric)
        if value is None:
            return None
        before = [other for at, other in self.values.items() if at != step]
        self.values[step] = value
        new = not before or (value < min(before) if self.smallest else value > max(before))
        return BestMark(self.metric, value) if new else None

    def check_known(self, logs: Mapping[str, Any]) -> None:
        """Refuse a metric that an evaluation has not got, where nothing of it is missing: it would never come."""
        lost = any(value for key, value in logs.items() if "missing" in key.split("/"))
        if self.metric not in logs and not lost and not self.values:
            raise UserError(
                f"train.save.best: the evaluation has no '{self.metric}'; {did_you_mean(self.metric, logs)}"
            )

    def since_best(self) -> int:
        """Evaluations since the best one (the first of equal ones)."""
        ordered = [self.values[step] for step in sorted(self.values)]
        return len(ordered) - 1 - ordered.index((min if self.smallest else max)(ordered)) if ordered else 0

    def describe_loss(self) -> str:
        """What the last evaluation has lost since the best one, in words; '' where it is as good."""
        if not self.values:
            return ""
        last, best = self.values[max(self.values)], (min if self.smallest else max)(self.values.values())
        if last == best:
            return ""
        step = next(step for step, value in sorted(self.values.items()) if value == best)
        return f"{self.metric} is {last:.4g} at the end and was {best:.4g} after step {step}"


def check_evaluations(recipe: Recipe) -> None:
    """Refuse evaluations of nothing, a metric that none of them has, and settings that need evaluations without any."""
    config, metric = recipe.eval, None if recipe.train.save.best == "auto" else recipe.train.save.best
    if metric is not None:
        words = metric.split()
        if len(words) > 2 or not words[-1].startswith("eval/") or (len(words) == 2 and words[0] not in ("min", "max")):
            raise UserError(
                f"train.save.best is '{metric}'; name a metric of the evaluations, such as 'eval/reward/mean'"
            )
        _check_kind(words[-1], recipe)
    if config.samples > 1 and not config.temperature:
        raise UserError(
            f"eval.samples is {config.samples}, but at temperature 0 all replies are the same; set eval.temperature"
        )
    for key, value in (("train.save.best", metric), ("eval.stop_after", config.stop_after)):
        if value and not config.every:
            raise UserError(f"{key} needs evaluations while training; set eval.every to the steps between them")


def _check_kind(metric: str, recipe: Recipe) -> None:
    """Refuse a metric of a kind that the method's evaluations do not have."""
    kinds = method_of(recipe.train.method).evaluates or (*HELD_OUT, "by/", "monitor/")
    name = metric.removeprefix("eval/")
    if not name.startswith(kinds):
        raise UserError(
            f"train.save.best is '{metric}', and no evaluation of {recipe.train.method} has it; the names begin with "
            f"{', '.join(f'eval/{kind}' for kind in kinds)}"
        )
    keys = [f"metric/{label}" for label in metric_labels(one.name for one in recipe.reward.metrics).values()]
    if name.startswith("metric/") and recipe.futures.name in ("talk", "none") and name not in keys:
        raise UserError(
            f"train.save.best is '{metric}', which is not among reward.metrics; "
            f"{did_you_mean(metric, [f'eval/{one}' for one in keys])}"
        )


def evaluated_step(line: Mapping[str, Any]) -> int:
    """The step whose model a line's evaluation is of: a step's line has that of the weights before its update."""
    return int(line["step"]) - (not is_evaluation(line))


def is_evaluation(line: Mapping[str, Any]) -> bool:
    """Whether a line has nothing but an evaluation."""
    return all(key in ("phase", "step") or is_evaluated(key) for key in line)


def is_evaluated(key: str) -> bool:
    """Whether a key is logged by evaluations."""
    return key.startswith(ONLY)
