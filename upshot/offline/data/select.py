"""Which candidates become rows for sft, rl and dpo. Pure functions; everything dropped is counted with its reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from upshot.tasks.datasets.candidates import Candidate, CandidatePair

ROUNDING = 1e-9
"""So that 0.7 − 0.2 counts as a gap of 0.5; equal scores are never a pair."""


def merge_duplicates(candidates: Iterable[Candidate], dropped: Counter[str]) -> list[Candidate]:
    """Candidates without repeats of the same reply to the same history of a goal; repeats average their scores."""
    merged = []
    for same in _groups(candidates, lambda c: (c.place, c.completion.strip())):
        scores = [c.score for c in same if c.score is not None]
        merged.append(replace(same[0], score=sum(scores) / len(scores)) if scores and len(same) > 1 else same[0])
        dropped["duplicate candidate"] += len(same) - 1
    return merged


def best_conversations(
    candidates: Sequence[Candidate], dropped: Counter[str], ranked: bool, least: Mapping[str, float] | None = None
) -> list[Candidate]:
    """SFT: per conversation the best reply of its last turn, which carries the best replies before it in its history.

    Candidates without a `conv_id` that reply to the same history are one conversation.

    ranked: whether any candidate of the whole source has a score, in whatever split. If so, those without a score are
    left out; if not (an ordinary prompt/completion file), the first reply of each `conv_id` is taken, and all others.
    """
    chosen: list[Candidate] = []
    for tried in _groups(candidates, lambda c: c.conv_id or (c.place if ranked else id(c))):
        last_turn = max(c.turn for c in tried)
        usable = [c for c in tried if c.turn == last_turn and (c.score is not None or not ranked)]
        if not usable:
            dropped["no score at the last turn"] += len(tried)
            continue
        best = max(usable, key=_score)
        low = too_low(best, least or {})
        if low is not None:
            dropped[low] += len(tried)
            continue
        dropped["not the best of its conversation"] += len(tried) - 1
        chosen.append(best)
    return _drop_repeats(chosen, dropped, "duplicate conversation", with_reply=True)


def distinct_prompts(candidates: Sequence[Candidate], dropped: Counter[str]) -> list[Candidate]:
    """RL: one row per history of a goal; it does not matter which of its candidates is kept."""
    with_goal = [c for c in candidates if c.goal]
    dropped["no hidden goal"] += len(candidates) - len(with_goal)
    return _drop_repeats(with_goal, dropped, "same prompt and goal", with_reply=False)


def best_and_worst(
    candidates: Sequence[Candidate], dropped: Counter[str], min_gap: float, least: Mapping[str, float] | None = None
) -> list[CandidatePair]:
    """DPO: per history the best and the worst reply, if their scores are at least `min_gap` apart."""
    scored = [c for c in candidates if c.score is not None]
    dropped["no score"] += len(candidates) - len(scored)
    pairs = []
    for tried in _groups(scored, lambda c: c.place):
        best, worst = max(tried, key=_score), min(tried, key=_score)
        if len(tried) < 2:
            dropped["only one scored candidate"] += 1
        elif _score(best) - _score(worst) < max(min_gap - ROUNDING, ROUNDING):
            dropped[f"gap below {min_gap:g}"] += len(tried)
        elif (low := too_low(best, least or {})) is not None:
            dropped[low] += len(tried)
        else:
            dropped["neither best nor worst"] += len(tried) - 2
            pairs.append(CandidatePair(best, worst))
    return pairs


def too_low(candidate: Candidate, least: Mapping[str, float]) -> str | None:
    """The first reason why a candidate's metrics are too low; None if they are high enough."""
    for name, value in least.items():
        measured = candidate.mean_of(name)
        if measured is None:
            return f"no {name}"
        if measured < value:
            return f"{name} below {value:g}"
    return None


def _drop_repeats(
    candidates: Sequence[Candidate], dropped: Counter[str], why: str, with_reply: bool
) -> list[Candidate]:
    groups = _groups(candidates, lambda c: (c.place, c.completion.strip() if with_reply else ""))
    dropped[why] += len(candidates) - len(groups)
    return [same[0] for same in groups]


def _groups(candidates: Iterable[Candidate], key: Callable[[Candidate], object]) -> list[list[Candidate]]:
    """Candidates grouped by a key, in the order in which the keys first appear."""
    groups: dict[object, list[Candidate]] = {}
    for candidate in candidates:
        groups.setdefault(key(candidate), []).append(candidate)
    return list(groups.values())


def _score(candidate: Candidate) -> float:
    return float("-inf") if candidate.score is None else candidate.score
