"""What classmates made of a thought → the classmate part of the reward. Pure functions.

Mean over the samples of a classmate, weighted mean over the classmates, times the weight of the part. What is missing
leaves its mean; a part is missing only when nobody's answer is left.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from upshot.core.score import Reason, Score, mean_score
from upshot.rollout.futures.classmates.options import CLASSMATE, ClassmatesOptions
from upshot.rollout.rollout import Future


def classmate_parts(
    futures: Sequence[Future],
    options: ClassmatesOptions,
    baselines: Mapping[str, Sequence[Score]],
    main: Score,
) -> dict[str, Score]:
    """The classmate part of a reply's reward, by name; with `steps` one for every stretch of the thought.

    `baselines`: what each classmate reaches without a thought. `main`: the verdict on the reply itself.
    """
    weights = {config.name: config.weight for config in options.classmates}
    cuts: dict[int, dict[str, list[Score]]] = defaultdict(lambda: defaultdict(list))
    for future in futures:
        if future.cut:
            cuts[future.cut][future.by].append(future.scores[CLASSMATE])
    out: dict[str, Score] = {}
    before = baselines
    for number in range(1, options.stretches + 1):
        reached: dict[str, list[Score]] = dict(cuts[number])
        change = gains_over(reached, before) if options.has_baselines else reached
        part = weighted_mean(change, weights) if reached else Score.missing(Reason.NO_THOUGHT)
        detail = {name: mean_score(scores).to_dict() for name, scores in reached.items()}
        part = replace(part, detail={**part.detail, "classmates": detail})
        part = apply_gate(part, options.gate, main, options.right_from)
        out[options.part_name(number)] = _scale(part, options.weight)
        before = reached if options.reward == "steps" and reached else before
    return out


def is_right(verdict: Score, right_from: float) -> bool:
    """Whether a verdict says that the answer is right."""
    return verdict.value is not None and verdict.value >= right_from - 1e-9


def weighted_mean(by_classmate: Mapping[str, Sequence[Score]], weights: Mapping[str, float]) -> Score:
    """The mean over each classmate's samples, averaged over the classmates that have one, by weight."""
    means = {name: mean_score(scores, f"{name}: no sample") for name, scores in by_classmate.items()}
    present = {name: mean.value for name, mean in means.items() if mean.value is not None}
    total = sum(weights[name] for name in present)
    if not present or total <= 0:
        return mean_score(means.values(), "no classmate")
    return Score(sum(weights[name] * value for name, value in present.items()) / total)


def gains_over(
    by_classmate: Mapping[str, Sequence[Score]], before: Mapping[str, Sequence[Score]]
) -> dict[str, list[Score]]:
    """Each sample minus what the same classmate reaches without; missing where that mean is."""
    out: dict[str, list[Score]] = {}
    for name, scores in by_classmate.items():
        base = mean_score(before.get(name, ()), f"{name}: no baseline")
        out[name] = [_minus(score, base) for score in scores]
    return out


def apply_gate(part: Score, gate: str, main: Score, right_from: float = 1.0) -> Score:
    """The part as the gate lets it through, by whether the main answer is right."""
    if gate == "no_classmate":
        return Score(0.0)
    if gate == "always":
        return part
    if main.value is None:
        return main
    if is_right(main, right_from):
        return part
    if gate == "no_classmate_when_main_incorrect":
        return Score(0.0)
    return part if part.value is None else Score(-part.value, detail=part.detail)


def _scale(part: Score, weight: float) -> Score:
    """The part times its weight."""
    return part if part.value is None else Score(part.value * weight, detail=part.detail)


def agreement(by_classmate: Mapping[str, Sequence[Score]]) -> float | None:
    """The share of pairs of classmates whose mean verdicts are on the same side of one half; None without a pair."""
    means = [mean_score(scores).value for scores in by_classmate.values()]
    sides = [mean >= 0.5 for mean in means if mean is not None]
    pairs = [(a, b) for i, a in enumerate(sides) for b in sides[i + 1 :]]
    return sum(a == b for a, b in pairs) / len(pairs) if pairs else None


def _minus(score: Score, base: Score) -> Score:
    if score.value is None or base.value is None:
        return score if score.value is None else base
    return Score(score.value - base.value)
