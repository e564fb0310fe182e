"""`rollouts.jsonl` → the conversations a page can carry, and counts of all of them.

Two passes: a survey of every reply (sizes, missing scores by reason), then only the chosen replies are kept. Counts
are of the whole file whatever is kept. What is kept is chosen by step and file order, never by reward.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from upshot.core.files import parse_json_line
from upshot.run.report.lines import SkippedLines, number, read_objects

MAX_TEXT = 12_000
"""Characters of one message or reason that are kept."""
HIDDEN = ("goal", "reference")
"""What the policy did not see of its row, and the reader wants to."""
MANY_STEPS = 8
"""When not all fits, steps are trimmed to their first prompt groups until at least so many steps fit."""


@dataclass(frozen=True, slots=True)
class RolloutLine:
    """Where a reply lies in the file, and about how many bytes it adds to the page."""

    offset: int
    length: int
    cost: int
    group: Any


@dataclass(slots=True)
class RolloutSurvey:
    """All replies of a run, counted."""

    steps: dict[float, list[RolloutLine]] = field(default_factory=dict)
    replies: int = 0
    futures: int = 0
    missing: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(what is missing, reason) → how often."""
    scored: Counter[str] = field(default_factory=Counter)
    """What could be missing → how many there are, present or not."""
    skipped: SkippedLines = field(default_factory=SkippedLines)


def survey(path: Path) -> RolloutSurvey:
    """Count every reply of a rollouts file."""
    found = RolloutSurvey()
    seen: dict[float, set[int]] = defaultdict(set)
    for offset, length, row in read_objects(path, found.skipped):
        step = number(row.get("step")) or 0.0
        cost = length - _repeated(row, seen[step])
        group = (row.get("phase"), row.get("group"), row.get("row"))
        found.steps.setdefault(step, []).append(RolloutLine(offset, length, max(cost, 1), group))
        found.replies += 1
        _count(row, found)
    return found


def _repeated(row: Mapping[str, Any], seen: set[int]) -> int:
    """Bytes of texts that the step had before: a prompt is embedded once, not once a reply."""
    again = 0
    for text in [*(message.get("content") for message in _messages(row)), *(row.get(name) for name in HIDDEN)]:
        if isinstance(text, str):
            again += len(text) if hash(text) in seen else max(0, len(text) - MAX_TEXT)
            seen.add(hash(text))
    return again


def _messages(row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The messages of a reply and of all its futures."""
    for part in [row, *_dicts(row.get("futures"))]:
        yield from _dicts(part.get("messages"))


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _count(row: Mapping[str, Any], found: RolloutSurvey) -> None:
    futures = _dicts(row.get("futures"))
    found.futures += len(futures)
    for future in futures:
        found.scored["future"] += 1
        if future.get("missing"):
            found.missing["future", str(future["missing"])[:300]] += 1
        _count_scores(future.get("scores"), found, "score: ")
    reward = row.get("reward")
    if isinstance(reward, dict) and "total" in reward:
        _count_scores({"reward of a reply": reward["total"]}, found, "")


def _count_scores(scores: Any, found: RolloutSurvey, prefix: str) -> None:
    if not isinstance(scores, dict):
        return
    for name, score in scores.items():
        what = f"{prefix}{name}"
        found.scored[what] += 1
        reason = missing_reason(score)
        if reason is not None:
            found.missing[what, reason[:300]] += 1


def missing_reason(score: Any) -> str | None:
    """Why a logged score has no value; None when it has one."""
    if isinstance(score, dict):
        if number(score.get("value")) is not None:
            return None
        return str(score.get("missing") or "no value and no reason in the log")
    return None if number(score) is not None else "no value and no reason in the log"


def choose(steps: Mapping[float, Sequence[RolloutLine]], budget: int) -> dict[float, list[RolloutLine]]:
    """The replies to embed: the first, the last and evenly spaced steps, as many as fit into `budget` bytes."""
    whole = {step: sum(line.cost for line in lines) for step, lines in steps.items()}
    if sum(whole.values()) <= budget:
        return {step: list(steps[step]) for step in sorted(steps)}
    share = budget // min(MANY_STEPS, len(steps))
    trimmed = {step: _first_groups(lines, share) for step, lines in sorted(steps.items())}
    order = list(trimmed)
    for count in range(len(order), 1, -1):
        kept = [order[index] for index in evenly(len(order), count)]
        if sum(line.cost for step in kept for line in trimmed[step]) <= budget:
            return {step: trimmed[step] for step in kept}
    return {step: trimmed[step] for step in order[-1:]}


def evenly(total: int, count: int) -> list[int]:
    """`count` of the indexes below `total`, evenly spaced, both ends among them."""
    return sorted({round(index * (total - 1) / (count - 1)) for index in range(count)})


def _first_groups(lines: Sequence[RolloutLine], share: int) -> list[RolloutLine]:
    """Whole prompt groups from the start of a step while they fit; of a group too big for that, its first replies."""
    groups: dict[Any, list[RolloutLine]] = defaultdict(list)
    for line in lines:
        groups[line.group].append(line)
    kept: list[RolloutLine] = []
    left = share
    for group in groups.values():
        cost = sum(line.cost for line in group)
        if cost > left:
            break
        kept += group
        left -= cost
    return kept or _first_fitting(next(iter(groups.values())), share)


def _first_fitting(lines: Sequence[RolloutLine], share: int) -> list[RolloutLine]:
    kept: list[RolloutLine] = []
    for line in lines:
        share -= line.cost
        if kept and share < 0:
            break
        kept.append(line)
    return kept


def load(path: Path, lines: Iterable[RolloutLine]) -> Iterator[dict[str, Any]]:
    """The chosen replies of a rollouts file."""
    with path.open("rb") as file:
        for line in lines:
            file.seek(line.offset)
            row = parse_json_line(file.read(line.length))
            if row is not None:
                yield row


class TextTable:
    """Message texts stored once and referred to by number."""

    def __init__(self) -> None:
        self.all: list[str] = []
        self.cut = 0
        """Texts that were longer than `MAX_TEXT`."""
        self._index: dict[str, int] = {}

    def add(self, text: str) -> int:
        """The number of a text."""
        if text not in self._index:
            self._index[text] = len(self.all)
            self.all.append(self._cut(text))
        return self._index[text]

    def _cut(self, text: str) -> str:
        if len(text) <= MAX_TEXT:
            return text
        self.cut += 1
        return f"{text[:MAX_TEXT]}\n… [{len(text) - MAX_TEXT:,} more characters are left out of this page]"


def pack(row: dict[str, Any], texts: TextTable) -> dict[str, Any]:
    """A reply with the texts of its messages and credited spans replaced by their numbers."""
    for message in _messages(row):
        content = message.pop("content", "")
        message["text"] = texts.add(content if isinstance(content, str) else str(content))
    for name in HIDDEN:
        hidden = row.pop(name, None)
        if hidden not in (None, "", [], {}):
            row[name] = texts.add(
                hidden if isinstance(hidden, str) else json.dumps(hidden, ensure_ascii=False, indent=1)
            )
    for span in _dicts(row.get("credit")):
        if isinstance(span.get("text"), str):
            span["text"] = texts.add(span["text"])
    return row
