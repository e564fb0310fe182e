"""What classmates made of a thought → the classmate part of the reward. Pure functions.

Mean over the samples of a classmate, weighted mean over the classmates, times the weight of the part. What is missing
leaves its mean; a part is missing only when nobody's answer that counts is left.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from upshot.core.score import Reason, Score, mean_score
from upshot.rewards.credit import plus
from upshot.rollout.futures.classmates.options import CLASSMATE, ClassmatesOptions
from upshot.rollout.reply import Future


def classmate_parts(
    futures: Sequence[Future],
    stretches: Sequence[int],
    options: ClassmatesOptions,
    baselines: Mapping[str, Sequence[Score]],
    main: Score,
) -> dict[str, Score]:
    """The classmate part of a reply's reward, by name; with `steps` one for every stretch that the thought has.

    `stretches`: those handed on, by number; none: there is no thought, and every part is missing. `baselines`: what
    each classmate reaches without a thought. `main`: the verdict on the reply itself.
    """
    weights = {config.name: config.weight for config in options.classmates}
    before = {name: mean_score(baselines.get(name, ()), f"{name}: no baseline") for name in weights}
    out: dict[str, Score] = {}
    for number in stretches or range(1, options.stretches + 1):
        verdicts = verdicts_by_classmate([future for future in futures if future.cut == number])
        reached = {name: mean_score(scores) for name, scores in verdicts.items()}
        part = Score.missing(Reason.NO_THOUGHT, "the reply has no thought to hand on")
        if reached:
            part = weighted_mean(_gains(reached, before, options), weights)
        part = replace(part, detail={**part.detail, "classmates": {n: mean.to_dict() for n, mean in reached.items()}})
        part = apply_gate(part, options.gate, main, options.right_from)
        out[options.part_name(number)] = _scale(part, options.weight)
        before = reached or before
    return out


def verdicts_by_classmate(futures: Sequence[Future]) -> dict[str, list[Score]]:
    """The verdicts on what each classmate answered to a thought."""
    verdicts: dict[str, list[Score]] = defaultdict(list)
    for future in futures:
        if future.cut and CLASSMATE in future.scores:
            verdicts[future.by].append(future.scores[CLASSMATE])
    return verdicts


def _gains(
    reached: Mapping[str, Score], before: Mapping[str, Score], options: ClassmatesOptions
) -> Mapping[str, Score]:
    """What each classmate's mean is taken as.

    Against no thought at all only what is gained counts: the plain difference is the same number less for all replies
    of a group, and every estimator that compares them would take it off again.
    """
    if not options.has_baselines:
        return reached
    gains = {name: plus(mean, _scale(before[name], -1.0)) for name, mean in reached.items()}
    if options.reward == "steps":
        return gains
    return {name: gain if gain.value is None else Score(max(gain.value, 0.0)) for name, gain in gains.items()}


def is_right(verdict: Score, right_from: float) -> bool:
    """Whether a verdict says that the answer is right."""
    return verdict.value is not None and verdict.value >= right_from - 1e-9


def weighted_mean(means: Mapping[str, Score], weights: Mapping[str, float]) -> Score:
    """The mean over the classmates that have one, by weight; one of weight 0 never decides."""
    counted = {name: mean for name, mean in means.items() if weights[name] > 0}
    present = {name: mean.value for name, mean in counted.items() if mean.value is not None}
    if not present:
        return mean_score(counted.values(), "no classmate")
    total = sum(weights[name] for name in present)
    return Score(sum(weights[name] * value for name, value in present.items()) / total)


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
    return _scale(part, -1.0)


def _scale(part: Score, weight: float) -> Score:
    """The part times its weight."""
    return part if part.value is None else Score(part.value * weight, detail=part.detail)


def agreement(by_classmate: Mapping[str, Sequence[Score]]) -> float | None:
    """The share of pairs of classmates whose mean verdicts are on the same side of one half; None without a pair."""
    means = [mean_score(scores).value for scores in by_classmate.values()]
    sides = [mean >= 0.5 for mean in means if mean is not None]
    pairs = [(a, b) for i, a in enumerate(sides) for b in sides[i + 1 :]]
    return sum(a == b for a, b in pairs) / len(pairs) if pairs else None
