"""How a conversation is scored: metrics, and rules for cut or empty replies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from upshot.config.recipe.base import Named, Section


class MetricConfig(Named):
    """One metric of the reward; further keys are its own options."""

    weight: float = 1.0
    """Factor on the metric's mean over futures; 0: only log it."""
    clamp: tuple[float, float] | None = None
    """Lower and upper bound of weight x mean."""
    tokens: Literal["all", "thought", "answer"] = "all"
    """Which tokens it is credited to. all: every token, as a term of the main reward. thought, answer: only those
    tokens; the metric is then a separate part of the reward, compared on its own, and if it is missing the other parts
    are not affected."""

    @field_validator("clamp")
    @classmethod
    def _in_order(cls, value: tuple[float, float] | None) -> tuple[float, float] | None:
        if value is not None and value[0] >= value[1]:
            raise ValueError("the first bound must be below the second")
        return value


class ReplyRuleConfig(Section):
    """How an unusable reply is scored."""

    rule: Literal["score", "missing", "penalty"] = "score"
    """score: like any other reply. missing: its reward is missing because of the policy (`reward.blamed`). penalty:
    its reward is `penalty`, and no futures are played."""
    penalty: float = -1.0
    """The reward under the rule 'penalty'."""


def list_metrics(value: Any) -> Any:
    """Metrics as a list; also from a mapping of names to weights or settings (`{accuracy: 1, bleu: {weight: 2}}`)."""
    if not isinstance(value, Mapping):
        return value
    return [
        {"name": name, **(setting if isinstance(setting, Mapping) else {"weight": setting})}
        for name, setting in value.items()
    ]


def _or_mapping(schema: dict[str, Any]) -> None:
    """Describe the second form to editors: a mapping of names to weights or settings."""
    items = {"type": schema.pop("type"), "items": schema.pop("items")}
    settings = {"anyOf": [{"type": "number"}, {"type": "object"}]}
    schema["anyOf"] = [items, {"type": "object", "additionalProperties": settings}]


class RewardConfig(Section):
    """How a conversation is scored."""

    metrics: Annotated[list[MetricConfig], BeforeValidator(list_metrics)] = Field(
        default_factory=lambda: [MetricConfig(name="verifier")], json_schema_extra=_or_mapping
    )
    """Metrics, summed after weight and clamp: a list of names or settings, or a mapping of names to weights or
    settings."""
    overlong: ReplyRuleConfig = ReplyRuleConfig()
    """Rule for replies that were cut at `episode.max_tokens`."""
    malformed: ReplyRuleConfig = ReplyRuleConfig()
    """Rule for replies that say nothing and call no tool."""
    manager: Named = Named(name="inline")
    """Where verifiers run: inline, pool or remote."""
    blamed: Literal["worst", "missing"] = "worst"
    """What a missing score counts as if the policy's own words caused it (see docs/why/missing.md). worst: the worst
    value in the step. missing: it is left out of the statistics, like scores that are missing for other reasons."""
    max_missing: float = Field(0.5, ge=0, le=1)
    """The run stops and lists the reasons if more than this share of a step's replies has no reward, or lacks the same
    other part of it (see docs/why/missing.md)."""
