"""Metric names of a recipe → metrics: `accuracy`, `my_pkg.mod:Metric`, or `artefact->metric`.

`document->bleu` reads: extract the document from the finished conversation, then score it by BLEU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from upshot.config.recipe import MetricConfig
from upshot.config.registry import path_of
from upshot.config.validation import check_value
from upshot.core.errors import UserError, did_you_mean
from upshot.rewards.metric import Metric, metrics
from upshot.rewards.reward import CLAMP

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
    options, context = _choose_judge(dict(options or {}), context, f"metric '{name}'", where)
    name = EXTRACTED.get(name, name)
    if ARROW not in name:
        return metrics.create(name, options, where, **context)
    from upshot.rewards.metrics.extraction import ExtractedMetric

    artefact, inner_name = _split(name, where)
    how = options.pop("extract", "judge")
    inner = metrics.create(inner_name, options, where, **context)
    return ExtractedMetric(artefact, inner, how, context.get("judge"), where)


def check_metric(name: str, options: Mapping[str, Any] | None = None, where: str = "", **context: Any) -> None:
    """Raise what `build_metric` would raise for a wrong name or option, without building."""
    options, name = dict(options or {}), EXTRACTED.get(name, name)
    if isinstance(options.get("judge"), str):
        options.pop("judge")
    if ARROW in name:
        from upshot.rewards.metrics.extraction import check_extraction

        artefact, name = _split(name, where)
        check_extraction(artefact, options.pop("extract", "judge"), where)
    metrics.check(name, options, where, **context)


def _split(name: str, where: str) -> tuple[str, str]:
    artefact, _, inner = (part.strip() for part in name.partition(ARROW))
    if not artefact or not inner or ARROW in inner:
        place = f" in {where}" if where else ""
        raise UserError(f"metric '{name}'{place} should read 'artefact->metric', such as 'document->bleu'")
    return artefact, inner


def _choose_judge(
    options: dict[str, Any], context: dict[str, Any], what: str, where: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """`judge: NAME` among the options picks that helper model for this metric."""
    chosen = options.get("judge")
    if not isinstance(chosen, str):
        return options, context
    models = context.get("models") or {}
    if chosen not in models:
        place = f" in {where}" if where else ""
        raise UserError(f"{what}{place} names the judge '{chosen}', which is no model; {did_you_mean(chosen, models)}")
    return {k: v for k, v in options.items() if k != "judge"}, {**context, "judge": models[chosen]}


def named_metrics(metrics: Any) -> dict[str, Any]:
    """Metrics by name, with weights or settings; functions and classes get the names by which they are found."""
    if not isinstance(metrics, Mapping):
        if isinstance(metrics, str) or not isinstance(metrics, Sequence):
            raise UserError(f"metrics is {metrics!r:.80}: give {{name or function: weight}}, or a list of them")
        metrics = dict.fromkeys(metrics, 1.0)
    found: dict[str, Any] = {}
    for key, setting in metrics.items():
        name = key if isinstance(key, str) else path_of(key)
        if not isinstance(setting, Mapping):
            setting = check_value(
                f"the weight of metric '{name}'", setting, Annotated[float, Field(allow_inf_nan=False)]
            )
        found[name] = setting
    return found


def metric_configs(metrics: Mapping[str, Any]) -> list[MetricConfig]:
    """Metrics from name → weight, or name → settings; a term is clamped to −1…1 unless `clamp` says otherwise."""
    out = []
    for name, setting in metrics.items():
        options = dict(setting) if isinstance(setting, Mapping) else {"weight": setting}
        out.append(check_value(f"metric '{name}'", {"clamp": CLAMP, **options, "name": name}, MetricConfig))
    return out
