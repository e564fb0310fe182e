"""What a conversation is worth: metrics, and rules for replies that are not as they should be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from upshot.config.recipe.base import Named, Section


class MetricConfig(Named):
    """One metric of the reward; further keys are its own options."""

    weight: float = 1.0
    """Factor on the mean over futures; 0 only logs it."""
    clamp: tuple[float, float] | None = None
    """Bounds of weight x mean, the lower one first."""
    tokens: Literal["all", "thought", "answer"] = "all"
    """Who earns it: every token as a term of the main reward, or those of the thought or of the answer alone, as a part
    of its own that is compared apart (and whose absence costs the others nothing)."""

    @field_validator("clamp")
    @classmethod
    def _in_order(cls, value: tuple[float, float] | None) -> tuple[float, float] | None:
        if value is not None and value[0] >= value[1]:
            raise ValueError("the first bound must be below the second")
        return value


class ReplyRuleConfig(Section):
    """What happens to a reply that is not as it should be."""

    rule: Literal["score", "missing", "penalty"] = "score"
    """score: as any other. missing: it has no reward, by its own doing (`reward.blamed`). penalty: it gets `penalty`
    and no futures."""
    penalty: float = -1.0
    """The reward under the rule 'penalty'."""


def list_metrics(value: Any) -> Any:
    """Metrics as a list; from a mapping of names to weights or settings, too (`{accuracy: 1, bleu: {weight: 2}}`)."""
    if not isinstance(value, Mapping):
        return value
    return [
        {"name": name, **(setting if isinstance(setting, Mapping) else {"weight": setting})}
        for name, setting in value.items()
    ]


class RewardConfig(Section):
    """What a conversation is worth."""

    metrics: Annotated[list[MetricConfig], BeforeValidator(list_metrics)] = Field(
        default_factory=lambda: [MetricConfig(name="verifier")]
    )
    """Summed up after weight and clamp: a list of names or settings, or a mapping of names to weights or settings."""
    overlong: ReplyRuleConfig = ReplyRuleConfig()
    """Rule for replies cut at `episode.max_tokens`."""
    malformed: ReplyRuleConfig = ReplyRuleConfig()
    """Rule for replies that say nothing and call no tool."""
    manager: Named = Named(name="inline")
    """Where verifiers run: inline, pool or remote."""
    blamed: Literal["worst", "missing"] = "worst"
    """A score that is missing because of the policy's own words (see docs/why/missing.md). worst: it counts as the
    worst value in the step. missing: it leaves the statistics, like scores that are missing for other reasons."""
    max_missing: float = Field(0.5, ge=0, le=1)
    """A step in which a larger share of the replies has no reward of its own stops the run with the reasons."""
