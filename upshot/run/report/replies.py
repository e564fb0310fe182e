"""`rollouts.jsonl` → an index of all replies in columns, and the few that a page of one file can carry.

The index holds what a list is filtered and sorted by, and where each reply lies; a reply itself is read when somebody
looks at it. Counts are of the whole file. What a page carries is chosen by step and file order, never by reward.

A run writes the index of each step beside the log (`rollouts.index.jsonl`, a block a line), so that a long run opens at
once. A block is taken where it fits the log; whatever has none (older runs, resumed ones, others' files) is read.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from upshot.core.files import parse_json_line
from upshot.run.report.lines import LogTail, number

INDEX = "rollouts.index.jsonl"
NO_REASON = "no value and no reason in the log"
MAX_REASON = 300
"""Characters of a reason, where reasons are counted."""
MAX_PROMPT = 160
"""Characters of a prompt in the list."""
MAX_FOUND = 2_000
"""Replies that a search for words finds at most."""
MANY_STEPS = 8
"""When not all fits, steps are trimmed to their first prompt groups until at least so many steps fit."""
CHUNK = 20_000
"""Replies of the index that are sent at once."""
FIRST = 1_000
"""Of the first stretch, so that there is something to read at once."""


class ReplyIndex:
    """Every reply of a run, a line in some columns; grows with the log."""

    def __init__(self, path: Path) -> None:
        self.log = LogTail(path)
        self.blocks = LogTail(path.with_name(INDEX))
        self.generation = 0
        """Goes up when the log was rewritten, and all numbers of replies are others'."""
        self._clear()

    def _clear(self) -> None:
        self.places: list[tuple[int, int]] = []
        """Offset and length of each reply's line."""
        self.strings: list[str] = []
        """What the columns `row` and `prompt`, the reasons and the slices refer to by number."""
        self._numbers: dict[str, int] = {}
        self.columns: dict[str, list[Any]] = {name: [] for name in ("step", "group", "row", "prompt", "key", "reward")}
        self.columns["missing"] = []
        """The reasons for which anything of the reply is missing; None where nothing is. First the reward's own."""
        self.slices: dict[str, list[int | None]] = {}
        """Field of `groups` → its value in each reply."""
        self.means: dict[str, list[float | int | None]] = {}
        """Metric → its mean over the futures of each reply."""
        self.scales: dict[str, list[float]] = {}
        """Lowest and highest: of rewards, of their terms and parts, of advantages, of each metric's scores."""
        self.futures = 0
        self.reasons: Counter[tuple[str, str]] = Counter()
        """(what is missing, reason) → how often."""
        self.scored: dict[str, int] = defaultdict(int)
        """What could be missing → how many there are, present or not."""
        self._waiting: dict[int, dict[str, Any]] = {}
        """Blocks by where in the log they begin."""

    def __len__(self) -> int:
        return len(self.places)

    def follow(self, seconds: float = math.inf) -> bool:
        """Read what the log has more, at most for so long; whether that is anything."""
        again = self.log.is_rewritten()
        before = len(self)
        if again:
            self.generation += 1
            self._clear()
            self.blocks = LogTail(self.blocks.path)
        until = time.monotonic() + seconds
        self._take_blocks(seconds)
        # A line read here while blocks are left would stand in the middle of the next one, and none would fit again.
        if len(self) == before or time.monotonic() < until:
            self._read_log(max(0.0, until - time.monotonic()))
        return again or len(self) != before

    def _read_log(self, seconds: float) -> None:
        for offset, length, row in self.log.read(seconds):
            self._add(offset, length, row)

    def _take_blocks(self, seconds: float) -> None:
        """Take every block that begins where the log has been read to."""
        for _, _, block in self.blocks.read(seconds):
            self._waiting[block["start"]] = block
            while (found := self._waiting.pop(self.log.end, None)) is not None and self._fits(found):
                self._merge(found)
        self._waiting = {start: block for start, block in self._waiting.items() if start >= self.log.end}

    def _fits(self, block: Mapping[str, Any]) -> bool:
        """Whether the log holds what the block says: its last reply stands where it should."""
        try:
            with self.log.path.open("rb") as file:
                file.seek(block["start"] + sum(block["lengths"][:-1]))
                row = parse_json_line(file.read(block["lengths"][-1])) or {}
        except OSError:
            return False
        columns = block["columns"]
        return (row.get("key"), row.get("step")) == (columns["key"][-1], columns["step"][-1])

    def block(self, start: int) -> dict[str, Any] | None:
        """The index of an otherwise unread log from an offset on, as a block; None where a line cannot be read."""
        self.log.end = start
        self._read_log(math.inf)  # its own blocks are longer every step, and say nothing of what was just written
        if self.log.skipped or self.log.cut or not self.places:
            return None
        own = {name: getattr(self, name) for name in ("columns", "slices", "means", "strings", "scales", "futures")}
        counts = {"reasons": [[*what, count] for what, count in self.reasons.items()], "scored": self.scored}
        return {"start": start, "lengths": [length for _, length in self.places], **own, **counts}

    def _merge(self, block: Mapping[str, Any]) -> None:
        numbers = [self._intern(text) for text in block["strings"]]
        count, at = len(self.places), block["start"]
        for length in block["lengths"]:
            self.places.append((at, length))
            at += length
        self.log.end, self.log.number = at, self.log.number + len(block["lengths"])
        renumber = lambda column: [None if value is None else numbers[value] for value in column]  # noqa: E731
        columns = dict(block["columns"])
        columns |= {name: renumber(columns[name]) for name in ("row", "prompt")}
        columns["missing"] = [None if own is None else renumber(own) for own in columns["missing"]]
        for name, column in columns.items():
            self.columns[name] += column
        slices = {name: renumber(column) for name, column in block["slices"].items()}
        for fields, more in ((self.slices, slices), (self.means, block["means"])):
            for name in {**fields, **more}:
                fields.setdefault(name, [None] * count).extend(more.get(name) or [None] * len(block["lengths"]))
        for name, scale in block["scales"].items():
            for value in scale:
                self._widen(name, value)
        self.futures += block["futures"]
        for what, reason, many in block["reasons"]:
            self.reasons[what, reason] += many
        for what, many in block["scored"].items():
            self.scored[what] += many

    def _add(self, offset: int, length: int, row: dict[str, Any]) -> None:
        # A hundred thousand of these are read while somebody waits: few calls, no list that is not kept.
        count = len(self.places)
        self.places.append((offset, length))
        found = row.get("reward")
        reward: dict[str, Any] = found if isinstance(found, dict) else {}
        missing = self._count(row, reward)
        columns, key, of_row = self.columns, row.get("key"), row.get("row")
        columns["step"].append(_short(number(row.get("step")) or 0.0))
        columns["group"].append(row.get("group"))
        columns["row"].append(self._intern(str(of_row) if of_row is not None else f"group {row.get('group')}"))
        columns["prompt"].append(self._intern(_prompt(row)))
        columns["key"].append(_well_formed(str(key)) if key is not None else str(count))
        columns["reward"].append(_short(self._widen("total", reward.get("total"))))
        columns["missing"].append([self._intern(reason) for reason in missing] if missing else None)
        for part in ("terms", "parts"):
            for _, score in _items(reward.get(part)):
                self._widen("reward", score)
        for span in dicts(row.get("credit")):
            self._widen("advantage", span.get("advantage"))
        self._put(self.slices, count, {name: self._intern(str(value)) for name, value in _items(row.get("groups"))})
        self._put(self.means, count, {name: _short(value_of(score)) for name, score in _items(reward.get("means"))})

    def _put(self, fields: dict[str, list[Any]], count: int, found: Mapping[str, Any]) -> None:
        for name in found:
            if name not in fields:
                fields[name] = [None] * count
        for name, column in fields.items():
            column.append(found.get(name))

    def _widen(self, name: str, score: Any) -> float | None:
        """Make a scale wide enough for a score; its value."""
        value = value_of(score)
        if value is not None:
            scale = self.scales.setdefault(name, [value, value])
            if value < scale[0]:
                scale[0] = value
            elif value > scale[1]:
                scale[1] = value
        return value

    def _intern(self, text: str) -> int:
        text = _well_formed(text)
        found = self._numbers.get(text)
        if found is None:
            found = self._numbers[text] = len(self.strings)
            self.strings.append(text)
        return found

    def _count(self, row: Mapping[str, Any], reward: Mapping[str, Any]) -> dict[str, None]:
        """Count what is there and what is missing; the reasons, the reward's own first."""
        reasons: dict[str, None] = {}
        if "total" in reward:
            self._count_score("reward of a reply", reward["total"], reasons)
        for future in dicts(row.get("futures")):
            self.futures += 1
            self.scored["future"] += 1
            if future.get("missing"):
                self._count_missing("future", str(future["missing"]), reasons)
            for name, score in _items(future.get("scores")):
                self._widen(f"score/{name}", score)
                self._count_score(f"score: {name}", score, reasons)
        return reasons

    def _count_score(self, what: str, score: Any, reasons: dict[str, None]) -> None:
        self.scored[what] += 1
        if value_of(score) is None:
            self._count_missing(what, str(missing_reason(score)), reasons)

    def _count_missing(self, what: str, reason: str, reasons: dict[str, None]) -> None:
        self.reasons[what, reason[:MAX_REASON]] += 1
        reasons[reason[:MAX_REASON]] = None

    def chunk(self, start: int = 0, strings: int = 0, wanted: Sequence[int] | None = None) -> dict[str, Any]:
        """A stretch of the index as JSON, or some replies of it; `strings`: how many of them the reader has."""
        chosen = range(start, min(len(self), start + (CHUNK if start else FIRST))) if wanted is None else wanted
        pick = lambda column: [column[at] for at in chosen]  # noqa: E731
        return {
            "from": start,
            "generation": self.generation,
            "columns": {name: pick(column) for name, column in self.columns.items()},
            "slices": {name: pick(column) for name, column in self.slices.items()},
            "means": {name: pick(column) for name, column in self.means.items()},
            "strings": self.strings[strings:],
        }

    def read(self, at: int) -> dict[str, Any]:
        """The reply of a number, as it was logged."""
        offset, length = self.places[at]
        with self.log.path.open("rb") as file:
            file.seek(offset)
            return parse_json_line(file.read(length)) or {}

    def find(self, words: str) -> list[int]:
        """The first replies in which something was said that holds these words, in whatever case."""
        # Letters of ASCII stand in a log as they are, others perhaps as escapes: those pick the lines worth reading.
        plain = [run.encode() for run in re.findall(r"[a-z0-9]+", words.lower())]
        found: list[int] = []
        with self.log.path.open("rb") as file:
            for at, (offset, length) in enumerate(self.places):
                file.seek(offset)
                line = file.read(length)
                lower = line.lower()
                if all(run in lower for run in plain) and words.lower() in said(line):
                    found.append(at)
                    if len(found) == MAX_FOUND:
                        break
        return found

    def choose(self, budget: int) -> list[int]:
        """The replies for a page: of the first, the last and evenly spaced steps, as many as fit into so many bytes."""
        steps: dict[float, list[int]] = defaultdict(list)
        for at, step in enumerate(self.columns["step"]):
            steps[step].append(at)
        costs = [length for _, length in self.places]
        if sum(costs) <= budget:
            return [at for step in sorted(steps) for at in steps[step]]
        share = budget // min(MANY_STEPS, len(steps))
        trimmed = {step: self._first_groups(steps[step], share) for step in sorted(steps)}
        order = list(trimmed)
        for count in range(len(order), 1, -1):
            kept = [at for index in evenly(len(order), count) for at in trimmed[order[index]]]
            if sum(costs[at] for at in kept) <= budget:
                return kept
        return trimmed[order[-1]]

    def _first_groups(self, replies: Sequence[int], share: int) -> list[int]:
        """Whole prompt groups from the start of a step while they fit; of one too big for that, its first replies."""
        groups: dict[Any, list[int]] = defaultdict(list)
        for at in replies:
            groups[json.dumps(self.columns["group"][at]), self.columns["row"][at]].append(at)
        kept: list[int] = []
        for group in groups.values():
            share -= sum(self.places[at][1] for at in group)
            if share < 0 and kept:
                break
            kept += group if share >= 0 else self._first_fitting(group, share)
        return kept

    def _first_fitting(self, group: Sequence[int], over: int) -> list[int]:
        """Of a group that is too big by so many bytes its first replies, one at least."""
        kept = list(group)
        while over < 0 and len(kept) > 1:
            over += self.places[kept.pop()][1]
        return kept


def evenly(total: int, count: int) -> list[int]:
    """`count` of the indexes below `total`, evenly spaced, both ends among them."""
    return sorted({round(index * (total - 1) / (count - 1)) for index in range(count)})


def value_of(score: Any) -> float | None:
    """The value of a logged score; None when it is missing."""
    value = score.get("value") if type(score) is dict else score
    return value if type(value) is float and value - value == 0 else number(value)


def missing_reason(score: Any) -> str | None:
    """Why a logged score has no value; None when it has one."""
    if value_of(score) is not None:
        return None
    return str((isinstance(score, dict) and score.get("missing")) or NO_REASON)


def said(line: bytes) -> str:
    """Everything that was said in a reply's line and its futures, in lower case."""
    row = parse_json_line(line) or {}
    turns = [message for part in (row, *dicts(row.get("futures"))) for message in dicts(part.get("messages"))]
    told = [f"{turn.get('content')}\n{json.dumps(turn.get('note') or '', ensure_ascii=False)}" for turn in turns]
    return "\n".join([str(row.get("row")), str(row.get("key")), *told]).lower()


def dicts(value: Any) -> list[dict[str, Any]]:
    """The objects in what should be a list of them."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _items(value: Any) -> list[tuple[str, Any]]:
    return list(value.items()) if isinstance(value, dict) else []


def _short(value: float | None) -> float | int | None:
    return None if value is None else int(value) if value == int(value) else round(value, 6)


def _well_formed(text: str) -> str:
    """Without lone surrogates, which no address can hold."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _prompt(row: Mapping[str, Any]) -> str:
    """The beginning of what the user said first."""
    asked = next((turn.get("content") for turn in dicts(row.get("messages")) if turn.get("role") == "user"), "")
    return str(asked or "")[: 2 * MAX_PROMPT].strip()[:MAX_PROMPT]
