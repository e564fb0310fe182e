"""A score is a number, or missing with a reason. Missing is not zero."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Score:
    """A value, or the reason why there is none."""

    value: float | None
    reason: str = ""
    """Why the value is missing: short, countable and stable, such as 'judge: timeout'."""
    detail: Mapping[str, Any] = field(default_factory=dict)
    """What a reader of the transcript wants to see: the judge's thought, the extracted answer, failed tests."""

    def __post_init__(self) -> None:
        if self.value is None and not self.reason:
            raise ValueError("a missing score needs its reason")
        if self.value is not None and not math.isfinite(self.value):
            raise ValueError(f"a score must be finite, not {self.value}; use Score.missing(reason)")

    @classmethod
    def missing(cls, reason: str, **detail: Any) -> Score:
        """No score, and why."""
        return cls(None, reason, detail)

    @property
    def is_missing(self) -> bool:
        """Whether there is no value."""
        return self.value is None

    def to_dict(self) -> dict[str, Any]:
        """For JSON: the value, or the reason it is missing."""
        out: dict[str, Any] = {"value": self.value} if self.value is not None else {"missing": self.reason}
        if self.detail:
            out["detail"] = dict(self.detail)
        return out


def mean_score(scores: Iterable[Score], nothing: str = "no scores") -> Score:
    """The mean of the present scores; missing, with the commonest reason, when none is left."""
    scores = list(scores)
    values = [s.value for s in scores if s.value is not None]
    if values:
        return Score(sum(values) / len(values))
    reasons = [s.reason for s in scores]
    return Score.missing(max(sorted(set(reasons)), key=reasons.count) if reasons else nothing)
