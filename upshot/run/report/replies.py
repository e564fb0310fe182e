"""`rollouts.jsonl` → an index of all replies, and the few that a page of one file can carry.

The index holds what a list is filtered and sorted by, and where each reply lies; a reply itself is read when somebody
looks at it. Counts are of the whole file. What a page carries is chosen by step and file order, never by reward.

It is an SQLite database. A run keeps one beside its log (`rollouts.index.sqlite`), so that a long run opens at once; a
page copies that into memory and writes nothing. It is believed where it fits the log. Whatever it lacks (older runs,
others' files) is read.
"""

from __future__ import annotations

import json
import math
import re
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from upshot.core.files import parse_json_line
from upshot.run.report.lines import LogTail, number

INDEX = "rollouts.index.sqlite"
SCHEMA = """
    pragma synchronous = off;  -- it can be made again
    create table if not exists read_to (end integer, lines integer, skipped text);
    create table if not exists replies (id integer primary key, start integer, length integer, step real, entry text);
    create table if not exists strings (id integer primary key, text text unique);
    create table if not exists counts (what text, reason text, count integer, primary key (what, reason));
    create table if not exists scales (name text primary key, low real, high real);
"""
ADD_COUNTS = (
    "insert into counts values (?, ?, ?) on conflict (what, reason) do update set count = count + excluded.count"
)
ADD_SCALES = """insert into scales values (?, ?, ?) on conflict (name) do update
    set low = min(low, excluded.low), high = max(high, excluded.high)"""
MISSING = """select own.what, own.reason, own.count, whole.count from counts own join counts whole using (what)
    where own.reason != '' and whole.reason = '' order by own.count desc, own.rowid"""
FIRST_GROUPS = """
    with grouped as (select id, step, length, min(id) over (partition by step, json_extract(entry, '$[1]', '$[2]'))
                     as leader from replies),
         summed as (select id, step, length, leader = min(id) over (partition by step) as is_first,
                           sum(length) over (partition by step order by leader) as with_group,
                           sum(length) over (partition by step order by leader, id) as alone from grouped)
    select id - 1, step, length from summed
    where with_group <= :share or is_first and (alone <= :share or alone = length) order by step, id"""
"""Of each step whole prompt groups that fit into `share` bytes; of a first one that does not, its first replies."""
COLUMNS = ("step", "group", "row", "prompt", "key", "reward", "missing")
"""What an entry begins with; two mappings follow: the fields of `groups`, and the mean of each metric over the futures.
Texts that many replies have (row, prompt, reasons, fields) are numbers of strings. `missing`: the reasons for which
anything of the reply is missing, the reward's own first; None where nothing is."""
NO_REASON = "no value and no reason in the log"
MAX_REASON = 300
"""Characters of a reason, where reasons are counted."""
MAX_PROMPT = 160
"""Characters of a prompt in the list."""
MAX_FOUND = 2_000
"""Replies that a search for words finds at most."""
MANY_STEPS = 8
"""When not all fits, steps are trimmed to their first prompt groups until at least this many steps fit."""
CHUNK = 20_000
"""Replies of the index that are sent at once."""
FIRST = 1_000
"""Of the first stretch, so that there is something to read at once."""
CATCH_UP_S = 0.5
"""How long a run reads at each step what its index lacks: after a resume that is the whole log."""


class ReplyIndex:
    """Every reply of a run; grows with the log."""

    def __init__(self, path: Path, kept: bool = False) -> None:
        """`kept`: in the file beside the log; else in memory."""
        self.log = LogTail(path)
        self.kept = kept
        self.generation = 0
        """Goes up when the log was rewritten, and all numbers of replies are others'."""
        self._reset(_connect(":memory:"))
        self._is_open = False

    def _reset(self, database: sqlite3.Connection) -> None:
        """Go on where a database ends."""
        self.database = database
        database.executescript(SCHEMA)
        self.count = self._ask("select count(*) from replies")[0][0]
        for end, lines, skipped in self._ask("select end, lines, skipped from read_to"):
            self.log.end, self.log.number, self.log.skipped = end, lines, json.loads(skipped)
        self._rows: list[tuple[Any, ...]] = []
        """What was read and is not in the database yet; as are the next two."""
        self._counts: Counter[tuple[str, str]] = Counter()
        """(what, why it is missing) → how often; without a why: how many there are, missing or not."""
        self._scales: dict[str, list[float]] = {}
        """Lowest and highest: of rewards, of their terms and parts, of advantages, of each metric's scores."""
        self._numbers: dict[str, int] = {}

    def _ask(self, query: str, *values: Any) -> list[Any]:
        return self.database.execute(query, values).fetchall()

    def __len__(self) -> int:
        return self.count

    def follow(self, seconds: float = math.inf) -> bool:
        """Read what the log has more, at most for `seconds`; whether that is anything."""
        again = self.log.is_rewritten()
        before = 0 if again or not self._is_open else self.count
        self.generation += again
        if again or not self._is_open:
            self.database.close()
            self._reset(open_database(self.log.path, self.kept))
            self._is_open = True
        read_to = self.log.end
        for start, length, row in self.log.read(seconds):
            self._add(start, length, row)
        if self.log.end != read_to:
            self._store()
        return again or self.count != before

    def _store(self) -> None:
        """Write what was read since the last time."""
        with self.database as db:
            db.executemany("insert into replies (start, length, step, entry) values (?, ?, ?, ?)", self._rows)
            db.executemany(ADD_COUNTS, [(*map(_well_formed, what), count) for what, count in self._counts.items()])
            db.executemany(ADD_SCALES, [(_well_formed(name), *scale) for name, scale in self._scales.items()])
            db.execute("delete from read_to")
            state = (self.log.end, self.log.number, json.dumps(self.log.skipped))
            db.execute("insert into read_to values (?, ?, ?)", state)
        self._rows, self._counts, self._scales = [], Counter(), {}

    def _add(self, start: int, length: int, row: dict[str, Any]) -> None:
        # A hundred thousand of these are read while a person waits: few calls, and no list that is not kept.
        logged = row.get("reward")
        reward: dict[str, Any] = logged if isinstance(logged, dict) else {}
        missing = self._count_scores(row, reward)
        of_row = row.get("row")
        asked = next((turn.get("content") for turn in dicts(row.get("messages")) if turn.get("role") == "user"), "")
        entry = [
            _short(number(row.get("step")) or 0.0),
            row.get("group"),
            self._intern(str(of_row) if of_row is not None else f"group {row.get('group')}"),
            self._intern(str(asked or "")[: 2 * MAX_PROMPT].strip()[:MAX_PROMPT]),
            _key(row, self.count),
            _short(self._widen("total", reward.get("total"))),
            [self._intern(reason) for reason in missing] or None,
            {name: self._intern(str(value)) for name, value in _items(row.get("groups"))},
            {name: _short(value_of(score)) for name, score in _items(reward.get("means"))},
        ]
        for part in ("terms", "parts"):
            for _, score in _items(reward.get(part)):
                self._widen("reward", score)
        for span in dicts(row.get("credit")):
            self._widen("advantage", span.get("advantage"))
        self._rows.append((start, length, entry[0], json.dumps(entry)))
        self.count += 1

    def _widen(self, name: str, score: Any) -> float | None:
        """Make a scale wide enough for a score; its value."""
        value = value_of(score)
        if value is not None:
            scale = self._scales.setdefault(name, [value, value])
            if value < scale[0]:
                scale[0] = value
            elif value > scale[1]:
                scale[1] = value
        return value

    def _intern(self, text: str) -> int:
        """The number of a string."""
        at = self._numbers.get(text)
        if at is None:
            whole = _well_formed(text)
            self.database.execute("insert or ignore into strings (text) values (?)", (whole,))
            at = self._numbers[text] = self._ask("select id from strings where text = ?", whole)[0][0] - 1
        return at

    def _count_scores(self, row: Mapping[str, Any], reward: Mapping[str, Any]) -> dict[str, None]:
        """Count what is there and what is missing; the reasons, the reward's own first."""
        reasons: dict[str, None] = {}

        def count(what: str, reason: str | None) -> None:
            self._counts[what, ""] += 1
            if reason is not None:
                self._counts[what, reason[:MAX_REASON]] += 1
                reasons[reason[:MAX_REASON]] = None

        if "total" in reward:
            count("reward of a reply", missing_reason(reward["total"]))
        for future in dicts(row.get("futures")):
            count("future", str(future["missing"]) if future.get("missing") else None)
            for name, score in _items(future.get("scores")):
                self._widen(f"score/{name}", score)
                count(f"score: {name}", missing_reason(score))
        return reasons

    # What the page asks for.

    @property
    def scales(self) -> dict[str, list[float]]:
        """Lowest and highest by name (see `_scales`)."""
        return {name: [low, high] for name, low, high in self._ask("select * from scales")}

    def missing(self) -> list[tuple[str, str, int, int]]:
        """What is missing, why, how often, and of how many; the most frequent first."""
        return self._ask(MISSING)

    def futures(self) -> int:
        """How many futures there are."""
        return self._ask("select sum(count) from counts where what = 'future' and reason = ''")[0][0] or 0

    def entries(self, wanted: Iterable[int]) -> list[list[Any]]:
        """What the list shows of some replies (`COLUMNS` and two mappings)."""
        chosen = json.dumps([at + 1 for at in wanted])
        rows = self._ask("select entry from json_each(?) wanted join replies on replies.id = wanted.value", chosen)
        return json.loads(f"[{','.join(entry for (entry,) in rows)}]")

    def steps(self) -> int:
        """How many steps there are."""
        return int(self._ask("select count(distinct step) from replies")[0][0])

    def chunk(self, start: int = 0, strings: int = 0, wanted: Sequence[int] | None = None) -> dict[str, Any]:
        """A stretch of the index as JSON, or some replies of it; `strings`: how many of them the reader has."""
        chosen = range(start, min(len(self), start + (CHUNK if start else FIRST))) if wanted is None else wanted
        entries = self.entries(chosen)
        columns = {name: [entry[at] for entry in entries] for at, name in enumerate(COLUMNS)}
        more = self._ask("select text from strings where id > ? order by id", strings)
        return {
            "from": start,
            "generation": self.generation,
            "columns": columns,
            "slices": _columns(entry[-2] for entry in entries),
            "means": _columns(entry[-1] for entry in entries),
            "strings": [text for (text,) in more],
        }

    def read(self, at: int) -> dict[str, Any]:
        """The reply of a number, as it was logged."""
        return read_line(self.log.path, *self._ask("select start, length from replies where id = ?", at + 1)[0])

    def find(self, words: str) -> list[int]:
        """The first replies in which something was said that holds these words, in whatever case."""
        # Letters of ASCII stand in a log as they are, others perhaps as escapes: those pick the lines worth reading.
        plain = [run.encode() for run in re.findall(r"[a-z0-9]+", words.lower())]
        places: list[int] = []
        with self.log.path.open("rb") as file:
            for at, (start, length) in enumerate(self._ask("select start, length from replies order by id")):
                file.seek(start)
                line = file.read(length)
                lower = line.lower()
                if all(run in lower for run in plain) and words.lower() in spoken_text(line):
                    places.append(at)
                    if len(places) == MAX_FOUND:
                        break
        return places

    def choose(self, budget: int) -> list[int]:
        """The replies for a page of `budget` bytes: of the first, the last and evenly spaced steps, as many as fit."""
        size = self._ask("select sum(length) from replies")[0][0] or 0
        share = size if size <= budget else budget // min(MANY_STEPS, self.steps())
        steps: dict[float, list[tuple[int, int]]] = defaultdict(list)
        for at, step, length in self.database.execute(FIRST_GROUPS, {"share": share}):
            steps[step].append((at, length))
        trimmed = list(steps.values())
        for count in range(len(trimmed), 1, -1):
            kept = [reply for place in evenly(len(trimmed), count) for reply in trimmed[place]]
            if sum(length for _, length in kept) <= budget:
                return [at for at, _ in kept]
        return [at for at, _ in trimmed[-1]] if trimmed else []


def _connect(place: str) -> sqlite3.Connection:
    # Searches run in a thread of their own.
    return sqlite3.connect(place, check_same_thread=False, uri=True)


def open_database(log: Path, kept: bool) -> sqlite3.Connection:
    """The database beside a log, or a copy of it in memory; an empty one where it does not fit the log."""
    file = log.with_name(INDEX)
    place = file.absolute().as_uri() if kept else ":memory:"
    database = _connect(place)
    with suppress(sqlite3.Error, OSError):  # none is there, or one that is of no use
        if not kept:
            with closing(_connect(f"{file.absolute().as_uri()}?mode=ro")) as beside:
                beside.backup(database)
        query = "select id - 1, start, length, entry from replies order by id desc limit 1"
        for at, start, length, entry in database.execute(query):
            row, (step, _, _, _, key, *_) = read_line(log, start, length), json.loads(entry)
            if (row.get("step"), _key(row, at)) == (step, key):  # the last reply stands where it should
                return database
    database.close()
    if kept:
        file.unlink(missing_ok=True)
    return _connect(place)


def read_line(log: Path, start: int, length: int) -> dict[str, Any]:
    """The object at a place of a log."""
    with log.open("rb") as file:
        file.seek(start)
        return parse_json_line(file.read(length)) or {}


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


def spoken_text(line: bytes) -> str:
    """Everything that was said in a reply's line and its futures, in lower case."""
    row = parse_json_line(line) or {}
    turns = [message for part in (row, *dicts(row.get("futures"))) for message in dicts(part.get("messages"))]
    texts = [f"{turn.get('content')}\n{json.dumps(turn.get('note') or '', ensure_ascii=False)}" for turn in turns]
    return "\n".join([str(row.get("row")), str(row.get("key")), *texts]).lower()


def dicts(value: Any) -> list[dict[str, Any]]:
    """The objects in what should be a list of them."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _columns(mappings: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Mappings as columns, None where one lacks a name."""
    rows = list(mappings)
    return {name: [row.get(name) for row in rows] for name in dict.fromkeys(name for row in rows for name in row)}


def _key(row: Mapping[str, Any], at: int) -> str:
    return _well_formed(str(row["key"])) if row.get("key") is not None else str(at)


def _items(value: Any) -> list[tuple[str, Any]]:
    return list(value.items()) if isinstance(value, dict) else []


def _short(value: float | None) -> float | int | None:
    return None if value is None else int(value) if value == int(value) else round(value, 6)


def _well_formed(text: str) -> str:
    """Without lone surrogates, which no address can hold."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()
