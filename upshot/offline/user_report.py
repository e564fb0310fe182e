"""Compares real and simulated users: measures of their turns, leaving, and a classifier that distinguishes them.

Transcripts are the unit of every interval and test: turns of one conversation are not independent. Pure functions.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from upshot.offline.statistics import Estimate, compare, estimate, wilson
from upshot.tasks.users.quality import copied_share, is_role_flip, words

MEASURES = {
    "words": "words a turn",
    "initiative": "turns with a question of its own",
    "information": "new words a turn",
    "lower": "turns that begin in lower case",
}
FOLDS = 5
SIDES = {"real": "real", "user": "said"}
"""The fields of a turn that hold the words of each."""


def make_report(lines: Sequence[Mapping[str, Any]], seed: int = 0) -> dict[str, Any]:
    """All numbers of the transcripts that were played."""
    out: dict[str, Any] = {"transcripts": len(lines)}
    spoken = [[turn for turn in line["turns"] if turn["real"] is not None and turn["said"]] for line in lines]
    for name in MEASURES:
        sides = {who: _by_transcript(lines, spoken, side, name) for who, side in SIDES.items()}
        out[name] = {who: _told(estimate(list(of_line.values()), seed)) for who, of_line in sides.items()}
        difference = compare(sides["user"], sides["real"], seed)
        if difference is not None:
            out[name]["difference"] = difference.to_dict()
    # How often it leaves where the real user left, and where the real user continued.
    every = [turn for line in lines for turn in line["turns"]]
    ends = [turn["left"] for turn in every if turn["real"] is None]
    goes_on = [turn["left"] for turn in every if turn["real"] is not None]
    places = {"where_they_left": ends, "too_early": goes_on}
    out["leaving"] = {name: wilson(sum(left), len(left)).to_dict() if left else {} for name, left in places.items()}
    turns = [(line, turn) for line, of_line in zip(lines, spoken, strict=True) for turn in of_line]
    if turns:
        flips = sum(is_role_flip(turn["said"], turn["heard"]) for _, turn in turns)
        copies = sum(copied_share(line["goal"], turn["said"]) >= 0.5 for line, turn in turns)
        out["role_flips"] = wilson(flips, len(turns)).to_dict()
        out["goal_pasted"] = wilson(copies, len(turns)).to_dict()
    out["told_apart"] = _told(estimate(tell_apart(spoken, seed), seed))
    personas = {line["persona"] for line in lines} - {""}
    if len(personas) > 1:
        out["personas"] = {name: _of_persona(lines, spoken, name, seed) for name in sorted(personas)}
    return out


def _of_persona(lines: Sequence[Any], spoken: Sequence[Any], persona: str, seed: int) -> dict[str, Any]:
    """The measures of the simulated user's turns under one persona."""
    chosen = [(line, turns) for line, turns in zip(lines, spoken, strict=True) if line["persona"] == persona]
    some, theirs = [line for line, _ in chosen], [turns for _, turns in chosen]
    return {name: _told(estimate(list(_by_transcript(some, theirs, "said", name).values()), seed)) for name in MEASURES}


def _by_transcript(
    lines: Sequence[Mapping[str, Any]], spoken: Sequence[Sequence[Mapping[str, Any]]], side: str, name: str
) -> dict[str, float]:
    """The mean of a measure over one side's turns, by transcript."""
    out = {}
    for line, turns in zip(lines, spoken, strict=True):
        if turns:
            # Both sides are measured after the real words: what does a turn add to what had really been said?
            before = {*words(line["opening"])} if turns[0]["heard"] else set()
            values = []
            for turn in turns:
                before |= {*words(turn["heard"])}
                values.append(measure(turn[side], before)[name])
                before |= {*words(turn["real"])}
            out[str(line["transcript"])] = fmean(values)
    return out


def measure(text: str, before: set[str]) -> dict[str, float]:
    """One message: its length, whether it asks, and how many words in it are new."""
    spoken = words(text)
    return {
        "words": float(len(spoken)),
        "initiative": float("?" in text),
        "information": float(len({word for word in spoken if len(word) > 3 or word.isdigit()} - before)),
        "lower": float(text[:1].islower()),
    }


def tell_apart(spoken: Sequence[Sequence[Mapping[str, Any]]], seed: int = 0) -> list[float]:
    """By transcript, how often a classifier that has not seen it identifies the real user's message.

    0.5 is chance. Logistic regression on words, pairs of letters and length, in five folds of transcripts.
    """
    import numpy as np

    played = [[[_features(turn[side]) for side in SIDES.values()] for turn in turns] for turns in spoken if turns]
    if len(played) < 2:
        return []
    order = random.Random(seed).sample(range(len(played)), len(played))
    folds = [order[start :: min(FOLDS, len(played))] for start in range(min(FOLDS, len(played)))]
    out = [0.0] * len(played)
    for fold in folds:
        seen = [turn for number, turns in enumerate(played) if number not in fold for turn in turns]
        often = Counter(name for turn in seen for features in turn for name in features).most_common(2000)
        names = [name for name, count in often if count > 1]
        weights = _fit(np.array([[name in features for name in names] for turn in seen for features in turn], float))
        for number in fold:
            # The two are a pair: which of them looks more real? A tie counts half.
            looks = [
                [[name in features for name in names] @ weights / len(features) ** 0.5 for features in turn]
                for turn in played[number]
            ]
            out[number] = fmean(1.0 if real > user else 0.5 if real == user else 0.0 for real, user in looks)
    return out


def _features(text: str) -> dict[str, None]:
    """The features of a text, without repeats and in order."""
    tokens = words(text)
    pairs = (f"c {text[at : at + 2]}" for at in range(min(len(text), 200) - 1))
    shape = (f"n {min(len(tokens) // 4, 10)}", f"e {text.strip()[-1:]}", f"b {text[:1]}")
    return dict.fromkeys((*(f"w {word}" for word in tokens), *pairs, *shape))


def _fit(data: Any, rounds: int = 60, rate: float = 0.5) -> Any:
    """Weights of features from alternating real and simulated messages: gradient steps on the mean loss, with decay."""
    import numpy as np

    data /= np.maximum(np.sqrt(data.sum(1, keepdims=True)), 1.0)
    labels, weights = np.arange(len(data)) % 2 == 0, np.zeros(data.shape[1])
    for _ in range(rounds):
        guess = 1 / (1 + np.exp(-data @ weights))
        weights = weights * (1 - 1e-3) + rate * len(labels) ** -0.5 * (data.T @ (labels - guess))
    return weights


def _told(interval: Estimate | None) -> dict[str, float]:
    return {} if interval is None else interval.to_dict()


def tell_report(file: str, report: Mapping[str, Any]) -> list[str]:
    """The report as lines of text."""
    out = [f"a simulated user compared with people in '{file}': {report['transcripts']} transcripts (95 % intervals)"]
    for name, title in MEASURES.items():
        row = report[name]
        if row["real"]:
            by = row["difference"]
            text = f"{_spread(row['user'])} against {_spread(row['real'])}: {_spread(by, '+')}, p = {by['p']:.2g}"
            out.append(f"  {title:<34}{text}")
    titles = {"where_they_left": "leaves where they left", "too_early": "leaves where they went on"}
    rows = [(title, report["leaving"][key]) for key, title in titles.items()]
    rows += [("talks like the assistant", report.get("role_flips")), ("pastes its goal", report.get("goal_pasted"))]
    rows += [("identified by a classifier (chance: 0.5)", report["told_apart"])]
    out += [f"  {title:<38}{_spread(interval)}" for title, interval in rows if interval]
    for persona, row in report.get("personas", {}).items():
        out.append(f"  as '{persona}': " + ", ".join(f"{MEASURES[key]} {_spread(row[key])}" for key in MEASURES))
    return out


def _spread(interval: Mapping[str, float], sign: str = "") -> str:
    return f"{interval['value']:{sign}.2f} ({interval['low']:{sign}.2f} to {interval['high']:{sign}.2f})"
