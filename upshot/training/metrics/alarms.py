"""A run that goes wrong: what cannot be learned from, and what a policy looks like that has stopped thinking. No torch.

Guards stop a run (`bad_step`); alarms only say what they see, with what to do about it (`Alarms`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

THOUGHTS = "rollout/thought_tokens"
WINDOW = 10
"""Steps that the start and the present are means over."""


def bad_step(logs: Mapping[str, Any]) -> str | None:
    """Why nothing good was learned in a step: a loss or a gradient that is not finite; None when it was."""
    for name, value in logs.items():
        if name.startswith("loss/") and not math.isfinite(value):
            return f"{name} is {value}"
    return "the gradient is not finite" if logs.get("train/skipped") else None


@dataclass(frozen=True)
class Alarm:
    """A metric, when its mean over the last steps is alarming beside that of the first ones, and the way out."""

    metric: str
    rings: Callable[[float, float], bool]
    """(first, now) → whether to say it."""
    words: str
    """With {first} and {now}."""


ALARMS = (
    Alarm(
        "policy/entropy",
        lambda first, now: now < 0.1 * first,
        "entropy fell from {first:.3g} to {now:.3g} nats a token: the policy says nearly the same every time. Lower "
        "train.lr, raise episode.temperature or train.clip.high, or set train.kl.weight; checkpoints before are better",
    ),
    Alarm(
        "rollout/reply_tokens",
        lambda first, now: now < 0.25 * first,
        "replies shrank from {first:.3g} to {now:.3g} tokens: look at rollouts.jsonl whether something short is "
        "rewarded for nothing (a metric that counts tokens, an empty answer)",
    ),
    Alarm(
        THOUGHTS,
        lambda first, now: now < 0.25 * first,
        "thoughts shrank from {first:.3g} to {now:.3g} tokens: the policy stops thinking. Lower train.lr or set "
        "train.kl.weight, and look whether a metric punishes length",
    ),
    Alarm(
        "rollout/cut",
        lambda first, now: now > 0.5 and now > first + 0.1,
        "{now:.0%} of the replies are cut at episode.max_tokens (first {first:.0%}): raise it, or give "
        "reward.overlong a penalty",
    ),
    Alarm(
        "reward/flat_groups",
        lambda first, now: now > 0.8,
        "in {now:.0%} of the groups all replies earn the same, and nothing is learned from those: take rows of another "
        "difficulty, raise train.group_size or episode.temperature, or add a metric that tells replies apart",
    ),
)


class Alarms:
    """Watches the lines of a phase; each alarm is said when it begins, and again only after it was over."""

    def __init__(self) -> None:
        self._seen: dict[str, list[float]] = {}
        self._first: dict[str, float] = {}
        self.ringing: dict[str, str] = {}
        """What is said now, by metric."""

    def watch(self, logs: Mapping[str, Any]) -> list[str]:
        """Take note of a line; what to say about it for the first time."""
        said = []
        if "rollout/reply_tokens" in logs:  # who thinks no more has no thoughts to count
            logs = {THOUGHTS: 0.0, **logs} if self._seen.get(THOUGHTS) else logs
        for alarm in ALARMS:
            text = self._judge(alarm, logs.get(alarm.metric))
            if text is None:
                self.ringing.pop(alarm.metric, None)
            elif alarm.metric not in self.ringing:
                said.append(text)
                self.ringing[alarm.metric] = text
        return said

    def _judge(self, alarm: Alarm, value: float | None) -> str | None:
        if value is None:
            return self.ringing.get(alarm.metric)  # a line that says nothing of it
        seen = self._seen.setdefault(alarm.metric, [])
        seen.append(value)
        del seen[:-WINDOW]
        if len(seen) < WINDOW:
            return None
        now = statistics.fmean(seen)
        first = self._first.setdefault(alarm.metric, now)
        return alarm.words.format(first=first, now=now) if alarm.rings(first, now) else None
