"""Metric names of a recipe → metrics: `accuracy`, `my_pkg.mod:Metric`, or `artefact->metric`.

`document->bleu` reads: extract the document from the finished conversation, then score it by BLEU.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from upshot.config.recipe import MetricConfig
from upshot.config.registry import path_of
from upshot.config.validation import check_value
from upshot.core.errors import UserError, did_you_mean
from upshot.rewards.credit import CLAMP
from upshot.rewards.metric import Metric, metrics
from upshot.rewards.metrics.extraction import ExtractedMetric, check_extraction

ARROW = "->"
EXTRACTED = {"bleu_score": "document->bleu_score"}
"""Names of the verl recipe whose metrics extract something first; its `pass_rate` does too, but is a name here."""
MetricLike = str | Callable[..., Any]
"""The name of a metric, its class, or a plain function of the conversation."""
Metrics = Mapping[Any, float | Mapping[str, Any]] | Sequence[MetricLike]
"""`MetricLike` → weight, or → {weight, clamp, the metric's own options}; or a list of them, each of weight 1."""


def build_metric(name: str, options: Mapping[str, Any] | None = None, where: str = "", **context: Any) -> Metric:
    """The metric behind a name; `options` come from the recipe, `context` (task, judge, …) from the program.

    Two options work for every metric: `judge` names one of the helper models to judge with, and on
    `artefact->metric` names `extract` says how the artefact is found.
    """
    options = dict(options or {})
    if isinstance(options.get("judge"), str):
        judge, models, place = options.pop("judge"), context.get("models") or {}, f" in {where}" if where else ""
        if judge not in models:
            raise UserError(
                f"metric '{name}'{place} names the judge '{judge}', which is not a model; {did_you_mean(judge, models)}"
            )
        context["judge"] = models[judge]
    path = name
    artefact, name, how = _split(name, options, where)
    metric = metrics.create(name, options, where, **context)
    if not isinstance(metric, Metric):
        raise UserError(
            f"metric '{name}' is a {type(metric).__name__}, not a Metric: derive it from upshot.Metric, "
            "or give a plain function of the conversation"
        )
    if artefact:
        metric = ExtractedMetric(artefact, metric, how, context.get("judge"), where)
    metric.path = path
    return metric


def check_metric(name: str, options: Mapping[str, Any] | None = None, where: str = "", **context: Any) -> None:
    """Raise what `build_metric` would raise for a wrong name or option, without building."""
    options = dict(options or {})
    if isinstance(options.get("judge"), str):
        del options["judge"]
    artefact, name, how = _split(name, options, where)
    if artefact:
        check_extraction(artefact, how, where)
    metrics.check(name, options, where, **context)


def _split(name: str, options: dict[str, Any], where: str) -> tuple[str, str, Any]:
    """The artefact ('': none) and the metric of it, and how it is found, which is taken out of the options."""
    name = EXTRACTED.get(name, name)
    if ARROW not in name:
        return "", name, None
    artefact, _, inner = (part.strip() for part in name.partition(ARROW))
    if not artefact or not inner or ARROW in inner:
        place = f" in {where}" if where else ""
        raise UserError(f"metric '{name}'{place} should read 'artefact->metric', such as 'document->bleu'")
    return artefact, inner, options.pop("extract", "judge")


def named_metrics(metrics: Any) -> dict[str, Any]:
    """Metrics by name, with weights or settings; functions and classes get the names by which they are found."""
    if not isinstance(metrics, Mapping):
        if isinstance(metrics, str) or not isinstance(metrics, Sequence):
            raise UserError(f"metrics is {metrics!r:.80}: give {{name or function: weight}}, or a list of them")
        metrics = dict.fromkeys(metrics, 1.0)
    named: dict[str, Any] = {}
    for key, setting in metrics.items():
        name = key if isinstance(key, str) else path_of(key)
        kind = dict[str, Any] if isinstance(setting, Mapping) else Annotated[float, Field(allow_inf_nan=False)]
        named[name] = check_value(f"the weight of metric '{name}'", setting, kind)
    return named


def metric_labels(names: Iterable[str]) -> dict[str, str]:
    """Metric of a recipe → its name in rewards, tables and logs (`metric/…`). For your own function or class
    (`rewards:polite`) that is the last part of its path (`polite`), unless another metric has that name. A function
    that a notebook defines again is numbered in its path (`here:polite-2`), not in its name."""
    names = dict.fromkeys(names)
    short = {name: name if ARROW in name else re.sub(r".*:(\w+)(-\d+)?$", r"\1", name) for name in names}
    ends = Counter(short.values())
    return {name: name if ends[end] > 1 or end in metrics else end for name, end in short.items()}


def metric_configs(metrics: Mapping[str, Any]) -> list[MetricConfig]:
    """Metrics from name → weight, or name → settings; a term is clamped to −1…1 unless `clamp` says otherwise."""
    out = []
    for name, setting in metrics.items():
        options = dict(setting) if isinstance(setting, Mapping) else {"weight": setting}
        out.append(check_value(f"metric '{name}'", {"clamp": CLAMP, **options, "name": name}, MetricConfig))
    return out
