"""What classmates made of a thought → the classmate part of the reward. Pure functions.

Mean over the samples of a classmate, weighted mean over the classmates, times the weight of the part. What is missing
leaves its mean; a part is missing only when nobody's answer is left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from upshot.core.score import Reason, Score, mean_score

GATES = (
    "always",
    "no_classmate",
    "no_classmate_when_main_incorrect",
    "neg_classmate_when_main_incorrect",
)


def weighted_mean(by_classmate: Mapping[str, Sequence[Score]], weights: Mapping[str, float]) -> Score:
    """The mean over each classmate's samples, averaged over the classmates that have one, by weight."""
    means = {name: mean_score(scores, f"{name}: no sample") for name, scores in by_classmate.items()}
    present = {name: mean.value for name, mean in means.items() if mean.value is not None}
    total = sum(weights[name] for name in present)
    if not present or total <= 0:
        return mean_score(means.values(), "no classmate")
    return Score(sum(weights[name] * value for name, value in present.items()) / total)


def gains(by_classmate: Mapping[str, Sequence[Score]], before: Mapping[str, Sequence[Score]]) -> dict[str, list[Score]]:
    """Each sample minus what the same classmate reaches without; missing where that mean is."""
    out: dict[str, list[Score]] = {}
    for name, scores in by_classmate.items():
        base = mean_score(before.get(name, ()), f"{name}: no baseline")
        out[name] = [_minus(score, base) for score in scores]
    return out


def gated(part: Score, gate: str, main: Score, right_from: float = 1.0) -> Score:
    """The part as the gate lets it through, by whether the main answer is right."""
    if gate == "no_classmate":
        return Score(0.0)
    if gate == "always":
        return part
    if main.value is None:
        return main
    if main.value >= right_from - 1e-9:
        return part
    if gate == "no_classmate_when_main_incorrect":
        return Score(0.0)
    return part if part.value is None else Score(-part.value, detail=part.detail)


def scaled(part: Score, weight: float) -> Score:
    """The part times its weight."""
    return part if part.value is None else Score(part.value * weight, detail=part.detail)


def agreement(by_classmate: Mapping[str, Sequence[Score]]) -> float | None:
    """The share of pairs of classmates whose mean verdicts are on the same side of one half; None without a pair."""
    means = [mean_score(scores).value for scores in by_classmate.values()]
    sides = [mean >= 0.5 for mean in means if mean is not None]
    pairs = [(a, b) for i, a in enumerate(sides) for b in sides[i + 1 :]]
    return sum(a == b for a, b in pairs) / len(pairs) if pairs else None


def no_thought() -> Score:
    """The part of a reply that left nothing to hand on."""
    return Score.missing(Reason.NO_THOUGHT)


def _minus(score: Score, base: Score) -> Score:
    if score.value is None or base.value is None:
        return score if score.value is None else base
    return Score(score.value - base.value)
