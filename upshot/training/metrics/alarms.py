"""A run that goes wrong: what cannot be learned from, and what a policy looks like that has stopped thinking. No torch.

Guards stop a run (`bad_step`); alarms only say what they see, with what to do about it (`Alarms`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from upshot.training.metrics.best import evaluated_step

THOUGHTS = "rollout/thought_tokens"
WINDOW = 10
"""Steps that the start and the present are means over."""
HELD_OUT = "eval/reward/mean"
FALL, HELD_OUT_FALL = 0.25, 0.15
"""Of its best, what the reward has lost when it is said to fall; held-out rows are the same every time."""
CHANCE = 5
"""Standard errors between the best mean and the present one that hundreds of steps reach by noise in < 1 % of runs:
the best is the luckiest window of all."""
DRIFT = 0.2
"""Nats a token between sampler and learner: ratios are off by a fifth on average, and many are cut."""
FALLING = "Lower train.lr{tree}, or set train.kl.weight; the best checkpoint of the evaluations (eval.every) is kept"
TREE = ", train the futures' turns too (credit.by=tree)"
"""Part of `FALLING`, in runs that do not do so already."""


def bad_step(logs: Mapping[str, Any]) -> str | None:
    """Why nothing good was learned in a step: a loss or a gradient that is not finite; None when it was."""
    for name, value in logs.items():
        if name.startswith("loss/") and not math.isfinite(value):
            return f"{name} is {value}"
    return "the gradient is not finite" if logs.get("train/skipped") else None


@dataclass
class Past:
    """What is known of a metric: means over the last lines, as many as the window of its alarm has."""

    values: list[float] = field(default_factory=list)
    """Those of the window."""
    first: float = math.nan
    now: float = math.nan
    best: float = -math.inf
    """The largest there was."""
    best_step: int = 0
    """The last step of that window."""
    noise: float = math.nan
    """How far the mean of the last window may be off by chance."""
    jumps: int = 0
    """From one value to the next."""
    squares: float = 0.0
    """Of the jumps, summed: of independent values each is twice their variance."""

    @property
    def chance(self) -> float:
        """The standard error of a difference of two means, by how far a step is from the next: a trend adds little."""
        return math.sqrt(self.squares / self.jumps / len(self.values))

    def add(self, value: float, step: int, window: int) -> bool:
        """Take note of a value; whether there is a whole window."""
        if self.values:
            self.jumps, self.squares = self.jumps + 1, self.squares + (value - self.values[-1]) ** 2
        self.values.append(value)
        del self.values[:-window]
        if len(self.values) < window:
            return False
        # Of two evaluations the better one: it has fallen when both are low.
        mean = statistics.fmean(self.values)
        self.now = mean if window == WINDOW else max(self.values)
        if self.jumps == window - 1:
            self.first = self.now
        if self.now > self.best:
            self.best, self.best_step = self.now, step
        self.noise = math.dist(self.values, [mean] * window) / math.sqrt(window * (window - 1))
        return True


@dataclass(frozen=True)
class Alarm:
    """A metric, when its mean over the last steps is alarming beside those before, and the way out."""

    metric: str
    rings: Callable[[Past], bool]
    words: str
    """With {first}, {now}, {best} and {best_step}."""
    window: int = WINDOW
    """Lines that a mean is over."""


ALARMS = (
    Alarm(
        "policy/entropy",
        lambda past: past.now < 0.1 * past.first,
        "entropy fell from {first:.3g} to {now:.3g} nats a token: the policy says nearly the same every time. Lower "
        "train.lr, raise episode.temperature or train.clip.high, or set train.kl.weight; use an earlier checkpoint",
    ),
    Alarm(
        "policy/drift",
        lambda past: past.now > DRIFT,
        "sampler and learner differ by {now:.2g} nats a token before the first update: replies are learned from as if "
        "others had written them. Sample from unquantized weights (model.engine.weights=model), weigh the "
        "difference (train.importance=truncate), or play fewer steps ahead (train.async_steps)",
    ),
    Alarm(
        "rollout/reply_tokens",
        lambda past: past.now < 0.25 * past.first,
        "replies shrank from {first:.3g} to {now:.3g} tokens: check in rollouts.jsonl whether short replies "
        "are rewarded by mistake (by a metric that counts tokens, or for an empty answer)",
    ),
    Alarm(
        THOUGHTS,
        lambda past: past.now < 0.25 * past.first,
        "thoughts shrank from {first:.3g} to {now:.3g} tokens: the policy stops thinking. Lower train.lr or set "
        "train.kl.weight, and check whether a metric punishes length",
    ),
    Alarm(
        "rollout/cut",
        lambda past: past.now > 0.5 and past.now > past.first + 0.1,
        "{now:.0%} of the replies are cut at episode.max_tokens (first {first:.0%}): raise it, or give "
        "reward.overlong a penalty",
    ),
    Alarm(
        "reward/flat_groups",
        lambda past: past.now > 0.8,
        "in {now:.0%} of the groups all replies earn the same, and nothing is learned from those: use rows of "
        "different difficulty, raise train.group_size or episode.temperature, or add a metric that tells replies apart",
    ),
    Alarm(
        "reward/unconfirmed",
        lambda past: past.now > 0.05 and past.now > past.first + 0.03,
        "the judge does not confirm {now:.0%} of the programs that pass their tests (first {first:.0%}): the policy "
        "may be learning to fool its tests. Read those replies (outcome unconfirmed in the report); they score 0",
    ),
    Alarm(
        "reward/blamed",
        lambda past: past.now > 0.1 and past.now > past.first + 0.05,
        "{now:.0%} of the replies caused a missing score (first {first:.0%}) and count as the worst of the step: "
        "missing/REASON says how. If your machine is to blame, fix it or set reward.blamed=missing",
    ),
    Alarm(
        "reward/mean",
        lambda past: past.now < past.best - max(FALL * abs(past.best), 3 * past.noise, CHANCE * past.chance),
        "the reward fell from {best:.3g} (steps until {best_step}) to {now:.3g}: what was learned is being lost. "
        + FALLING,
    ),
    Alarm(
        HELD_OUT,
        lambda past: past.now < past.best - HELD_OUT_FALL * abs(past.best),
        "the held-out reward fell from {best:.3g} at step {best_step} to {now:.3g}: that checkpoint is better than the "
        "last one. " + FALLING,
        window=2,
    ),
    Alarm(
        "rollout/futures_left",
        lambda past: past.best > 0.2 and past.now < 0.5 * past.best,
        "the user ended {best:.0%} of the futures (steps until {best_step}) and ends {now:.0%} now: conversations no "
        "longer end. Look at the futures in the report. " + FALLING,
    ),
    Alarm(
        "rollout/future_repeats",
        lambda past: past.now > 0.3 and past.now > past.first + 0.2,
        "{now:.0%} of the policy's turns in futures repeat one that it said before (first {first:.0%}): it has "
        "forgotten how to continue. " + FALLING,
    ),
)


class Alarms:
    """Watches the lines of a phase; each alarm is said when it begins, and again only after it was over."""

    def __init__(self, trains_futures: bool = False) -> None:
        """trains_futures: whether the recipe's credit rule does, so that no alarm recommends what is set."""
        self._tree = "" if trains_futures else TREE
        self._seen: dict[str, Past] = {}
        self.ringing: dict[str, str] = {}
        """What is said now, by metric."""

    def watch(self, logs: Mapping[str, Any], step: int = 0) -> list[str]:
        """Take note of the line of a step; what to say about it for the first time."""
        texts = []
        if "rollout/reply_tokens" in logs:  # a policy that stopped thinking has no thoughts to count
            logs = {THOUGHTS: 0.0, **logs} if THOUGHTS in self._seen else logs
        for alarm in ALARMS:
            name, value = alarm.metric, logs.get(alarm.metric)
            if value is None:
                continue  # a line that says nothing of it: what rings goes on ringing
            at = evaluated_step({**logs, "step": step}) if name == HELD_OUT else step
            past = self._seen.setdefault(name, Past())
            if not (past.add(value, at, alarm.window) and alarm.rings(past)):
                self.ringing.pop(name, None)
            elif name not in self.ringing:
                self.ringing[name] = alarm.words.format(**vars(past), tree=self._tree)
                texts.append(self.ringing[name])
        return texts
