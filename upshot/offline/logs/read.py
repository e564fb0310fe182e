"""Reads conversations from any chat log, one at a time: JSON lines, JSON, parquet; unreadable records are counted.

A record has its messages under one of `MESSAGES`, each with a role (role, from, speaker) and words (content, value,
text, utterance). No file is read as a whole: at most a line, or one conversation, is in memory.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

import yaml

from upshot.core.conversation import Message
from upshot.core.errors import UserError
from upshot.core.files import expand_home
from upshot.offline.job import progress
from upshot.offline.logs.mask import mask

NAMES: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "names.yaml").read_text("utf-8"))
MESSAGES: list[str] = NAMES["messages"]
USUAL: dict[str, list[str]] = NAMES["fields"]
"""The usual names of each field, for fields that no option names."""
ROLES = {name: role for role, names in NAMES["roles"].items() for name in names}
YES, NO = (set(NAMES["outcomes"][value]) for value in (1, 0))
NESTED = ("metadata", "meta", "info")
RESULT = "tool_result"
"""The type of a message part that holds a tool's answer."""
SUFFIXES = (".jsonl", ".json", ".parquet", ".ndjson")
CHUNK = 1 << 20
LONGEST_LINE = 64 << 20
PLACES = 3
"""How many places are listed for each reason."""
REASONS = 20
"""How many reasons are listed."""


@dataclass(frozen=True)
class LoggedConversation:
    """Messages and outcome. A tool's answer is a user message named 'tool', because both answer the assistant."""

    messages: tuple[Message, ...]
    """Turns alternate; the first is the user's."""
    system: str = ""
    outcome: float | None = None
    customer: str = ""
    time: str = ""
    kind: str = ""
    place: str = ""


class BadRecord(Exception):
    """Why a record is not a conversation."""


class LogReader:
    """Reads files and counts what it could not read, by reason."""

    def __init__(
        self,
        files: Sequence[str],
        fields: Mapping[str, str | None] = MappingProxyType({}),
        roles: Mapping[str, str] = MappingProxyType({}),
        keep_personal: bool = False,
        quiet: bool = True,
    ) -> None:
        """fields: the names of fields, by the keys of `USUAL`. roles: unusual role names → roles."""
        self.paths = list(dict.fromkeys(path for name in files for path in _paths(name)))
        names = Counter(path.name for path in self.paths)
        self.labels = {path: path.name if names[path.name] == 1 else str(path) for path in self.paths}
        self.fields, self.roles = fields, {**ROLES, **roles}
        self.keep_personal, self.quiet = keep_personal, quiet
        self.records = 0
        """Those that were read, and all that is counted in `unread`."""
        self.unread: Counter[str] = Counter()
        """Records that are not conversations, by reason."""
        self.notes: Counter[str] = Counter()
        """Oddities in records that were read, by reason."""
        self.places: dict[str, list[str]] = {}
        self.masked: Counter[str] = Counter()
        self.outcome_types: Counter[str] = Counter()
        self.outcome_fields: Counter[str] = Counter()
        self.absent = {name for name, field in fields.items() if field}
        """Named fields that no record had so far."""

    def __iter__(self) -> Iterator[LoggedConversation]:
        total = sum(path.stat().st_size for path in self.paths)
        with progress("MB read", total // CHUNK, 0, self.quiet) as advance:
            before, seen = 0, 0
            for path in self.paths:
                for place, position, record in self._records(path):
                    while seen < (before + position) // CHUNK:
                        seen += 1
                        advance()
                    conversation = self._conversation(record, place)
                    if conversation is not None:
                        yield conversation
                before += path.stat().st_size

    def count(self, counter: Counter[str], reason: str, place: str) -> None:
        """Count one more for a reason."""
        counter[reason] += 1
        self.records += counter is self.unread
        places = self.places.setdefault(reason, [])
        if len(places) < PLACES:
            places.append(place)

    def account(self) -> list[str]:
        """What was not read and what is odd, one line per reason."""
        out = []
        for counter, verb in ((self.unread, "left out"), (self.notes, "note")):
            for reason, number in counter.most_common(REASONS):
                out.append(f"{verb}: {number:,} × {reason} ({'; '.join(self.places[reason])})")
            if rest := counter.most_common()[REASONS:]:
                out.append(f"{verb}: {sum(number for _, number in rest):,} × {len(rest):,} other reasons")
        out += [f"note: no conversation has the field '{self.fields[name]}' (--{name})" for name in sorted(self.absent)]
        differ = ((self.outcome_fields, "--outcome names one"), (self.outcome_types, "yes counts as 1 and no as 0"))
        for counter, remark in differ:
            if len(counter) > 1:
                names = " and ".join(f"{name} in {number:,}" for name, number in counter.most_common())
                out.append(f"note: the outcome is {names} conversations; {remark}")
        if self.masked:
            out.append("masked: " + ", ".join(f"{number:,} {name}" for name, number in self.masked.most_common()))
        return out

    def _records(self, path: Path) -> Iterator[tuple[str, int, Any]]:
        """(place, bytes read so far, record) of a file."""
        try:
            if path.suffix == ".parquet":
                yield from self._rows(path)
                return
            with path.open("rb") as probe:
                start = probe.read(4)
            if not start:
                self.count(self.unread, "empty file", self.labels[path])
            if start.startswith((b"\x1f\x8b", b"PK\3\4", b"(\xb5/\xfd")):
                raise ValueError("it is compressed; unpack it first")
            encoding = json.detect_encoding(start.strip(b"\0") and start)  # zeros alone are a block nobody wrote
            with path.open(encoding=encoding, errors="surrogateescape", newline="\n") as file:
                lines = path.suffix != ".json" or _is_lines(file)
                lines = lines and not start.lstrip().startswith(b"[")
                yield from self._lines(file, path) if lines else self._values(file, path)
        except (OSError, ValueError, UnicodeError) as error:
            self.count(self.unread, f"file cannot be read: {str(error)[:100]}", self.labels[path])

    def _rows(self, path: Path) -> Iterator[tuple[str, int, Any]]:
        import pyarrow.parquet

        file, number = pyarrow.parquet.ParquetFile(path), 0
        share = path.stat().st_size / max(file.metadata.num_rows, 1)
        for batch in file.iter_batches(batch_size=256):
            for record in batch.to_pylist():
                number += 1
                yield f"{self.labels[path]}, row {number}", int(number * share), record

    def _lines(self, file: IO[str], path: Path) -> Iterator[tuple[str, int, Any]]:
        number = position = 0
        while line := file.readline(LONGEST_LINE):
            number, place = number + 1, f"{self.labels[path]}, line {number + 1}"
            position += len(line)
            if not line.endswith("\n") and len(line) == LONGEST_LINE:
                while (rest := file.readline(LONGEST_LINE)) and not rest.endswith("\n"):
                    position += len(rest)
                self.count(self.unread, f"line longer than {LONGEST_LINE >> 20} MB", place)
            elif line.strip():
                try:
                    yield place, position, json.loads(self._mend(line, place))
                except (ValueError, RecursionError):  # the latter: brackets nested thousands deep
                    self.count(self.unread, "broken line (not JSON)", place)

    def _values(self, file: IO[str], path: Path) -> Iterator[tuple[str, int, Any]]:
        """The objects of a JSON file: of its list, bare or under one key, or one after another."""
        decoder, size, number, loose = json.JSONDecoder(), CHUNK, 0, list[Any]()
        label = self.labels[path]
        buffer = self._mend(file.read(CHUNK), label)
        position, buffer = len(buffer), buffer.lstrip().removeprefix("[")
        while True:
            buffer = buffer.lstrip(" \r\n\t,]")
            try:
                value, end = decoder.raw_decode(buffer)
            except RecursionError:
                self.count(self.unread, "JSON nested too deeply: the rest of the file", f"{label}, value {number + 1}")
                break
            except ValueError:
                more = self._mend(file.read(size), label)
                buffer, size, position = buffer + more, size * 2, position + len(more)
                if more:
                    continue
                if buffer.strip():
                    self.count(self.unread, "broken JSON: the rest of the file", f"{label}, after value {number}")
                break
            buffer, size, number = buffer[end:], CHUNK, number + 1
            place = f"{label}, value {number}"
            if isinstance(value, dict) and _role(value) and not any(name in value for name in MESSAGES):
                loose.append(value)  # the whole file is one conversation: a list of messages
            elif isinstance(value, dict) and (nested := _nested_list(value)) is not None:
                yield from ((f"{place}, {at}", position, one) for at, one in enumerate(nested, 1))
            else:
                yield place, position, value
        if loose:
            yield label, position, loose

    def _mend(self, line: str, place: str) -> str:
        """The line; bytes that are not UTF-8 are read as Windows-1252."""
        try:
            line.encode()
        except UnicodeEncodeError:
            self.count(self.notes, "not UTF-8; read as Windows-1252", place)
            return line.encode("utf-8", "surrogateescape").decode("cp1252", "replace")
        return line

    def _conversation(self, record: Any, place: str) -> LoggedConversation | None:
        try:
            system, messages = self._messages(record, place)
        except BadRecord as reason:
            self.count(self.unread, str(reason), place)
            return None
        self.records += 1
        data = record if isinstance(record, dict) else {}
        places = [data, *(data[name] for name in NESTED if isinstance(data.get(name), dict))]
        named = {name: [field] for name, field in self.fields.items() if field}
        fields = {name: _find(places, names) for name, names in (USUAL | named).items()}
        self.absent -= {name for name, values in fields.items() if values}
        outcome = self._outcome(fields.pop("outcome"), place)
        texts = {name: _written(str(next(iter(values.values()), ""))) for name, values in fields.items()}
        if texts["time"] and moment_of(texts["time"]) is None:
            self.count(
                self.notes,
                "time is neither a number nor a date of ISO 8601 or of an email",
                f"{place}: {texts['time'][:30]!r}",
            )
        return LoggedConversation(messages, system, outcome, **texts, place=place)

    def _messages(self, record: Any, place: str) -> tuple[str, tuple[Message, ...]]:
        items = record if isinstance(record, list) else None
        if isinstance(record, dict):
            lists = (_listed(record.get(name)) for name in MESSAGES)
            items = next((found for found in lists if found is not None), None)
        if items is None:
            columns = list(record) if isinstance(record, dict) else []
            if name := next((name for name in MESSAGES if name in columns), None):
                raise BadRecord(f"'{name}' is {type(record[name]).__name__}, not a list of messages")
            shown = f"; it has {', '.join(columns[:8])}" if columns else ""
            raise BadRecord(f"no messages (expected a list under {', '.join(MESSAGES[:3])} …{shown})")
        system, spoken, greeted = "", list[Message](), False
        for item in items:
            message = self._message(item)
            if not message.content.strip():
                self.count(self.notes, "message without words left out", place)
            elif message.role == "system" and spoken:
                self.count(self.notes, "system message after the first turn left out", place)
            elif message.role == "system":
                system = "\n".join(filter(None, (system, message.content)))
            else:
                if spoken and spoken[-1].role == message.role:  # two messages of one role in a row are one turn
                    joined = f"{spoken[-1].content}\n{message.content}"
                    spoken[-1] = replace(message, content=joined, name=message.name and spoken[-1].name)
                elif spoken or message.role == "user":
                    spoken.append(message)
                else:
                    greeted = True
        if greeted and spoken:
            self.count(self.notes, "greeting of the assistant before the first message left out", place)
        if not spoken:
            raise BadRecord("nobody but the assistant speaks" if greeted else "empty conversation")
        if len(spoken) == 1:
            raise BadRecord("the assistant says nothing")
        return system, tuple(spoken)

    def _message(self, item: Any) -> Message:
        if not isinstance(item, dict):
            raise BadRecord(f"a message is {type(item).__name__}, not an object")
        name = _role(item)
        if not name:
            raise BadRecord("a message has no role (role, from or speaker)")
        role = self.roles.get(name.lower())
        if "speaker" in item and name.lower() == "system":  # in task-oriented sets the system is the assistant
            role = "assistant"
        if role is None:
            raise BadRecord(f"unknown role '{name[:40]}' (map it: --roles {name[:40]}=user)")
        content = next((item[key] for key in ("content", "value", "text", "utterance") if key in item), "")
        if isinstance(content, list) and any(isinstance(one, dict) and one.get("type") == RESULT for one in content):
            role = "tool"  # some services send a tool's answer as the user's
        calls = item.get("tool_calls") or [item[name] for name in ("function_call",) if item.get(name)]
        asked = () if role != "assistant" else calls if isinstance(calls, list) else [calls]
        text = _written("\n".join([_text(content), *map(_call, asked)]))
        if not self.keep_personal:
            text = mask(text, self.masked)
        if role == "tool":
            return Message("user", f"[{item.get('name') or 'tool'}] {text.strip()}", name="tool")
        return Message(role, text.strip())

    def _outcome(self, found: Mapping[str, Any], place: str) -> float | None:
        """The first field that was found, as a number; that others look like an outcome, too, is noted."""
        field, value = next(iter(found.items()), ("", None))
        if others := ", ".join(f"'{name}'" for name in list(found)[1:]):
            self.count(self.notes, f"'{field}' is taken as the outcome, not {others} (--outcome names one)", place)
        if isinstance(value, str):
            word = value.strip().lower()
            value = True if word in YES else False if word in NO else value
        if value is None or value == "":
            return None
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            reason = "outcome is neither a number nor yes or no; it counts as missing"
            self.count(self.notes, reason, f"{place}: {str(value)[:30]!r}")
            return None
        self.outcome_types["yes or no" if isinstance(value, bool) else "a number"] += 1
        self.outcome_fields[f"'{field}'"] += 1
        return number


def _find(places: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """The values of the fields that exist, by name or dotted path, in the order of the names."""
    found: dict[str, Any] = {}
    for name in names:
        for place in places:
            value: Any = place
            for part in name.split("."):
                value = value.get(part) if isinstance(value, dict) else None
            if value is not None:
                found.setdefault(name, value)
    return found


def moment_of(time: str) -> float | None:
    """Seconds since 1970: of a number (seconds, or thousandths or millionths of one) or a date; None for other texts.

    Dates are in ISO's form or an email's (`Mon, 5 Jan 2026 10:00:00 GMT`); those without a time zone are in UTC.
    """
    try:
        seconds = float(time)
    except ValueError:
        for parse in (datetime.fromisoformat, parsedate_to_datetime):
            try:
                moment = parse(time)
                return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
            except (ValueError, OverflowError):
                continue
        return None
    scale = next((scale for scale in (1.0, 1e3, 1e6, 1e9) if abs(seconds) < 1e11 * scale), math.nan)
    return seconds / scale if math.isfinite(seconds / scale) else None


def _role(item: Mapping[str, Any]) -> str:
    return str(item.get("role") or item.get("from") or item.get("speaker") or "")


def _written(text: str) -> str:
    """The text as a file can hold it: half a surrogate pair becomes a question mark."""
    return text.encode("utf-8", "replace").decode()


def _text(content: Any) -> str:
    """The words of a message; content in parts becomes texts, calls and results, and the names of all other parts."""
    if isinstance(content, list):
        return "\n".join(_part(part) if isinstance(part, dict) else str(part or "") for part in content)
    return content if isinstance(content, str) else "" if content is None else json.dumps(content, ensure_ascii=False)


def _part(part: Mapping[str, Any]) -> str:
    kind = part.get("type")
    if kind == "tool_use":
        return _call({"name": part.get("name"), "arguments": part.get("input")})
    shown = part.get("content") if kind == RESULT else part.get("text")
    return f"[{kind}]" if shown is None and kind else _text(shown)


def _call(call: Any) -> str:
    """A tool call as text in a message."""
    function = call.get("function", call) if isinstance(call, dict) else call
    return f"<tool_call>{json.dumps(function, ensure_ascii=False)}</tool_call>"


def _listed(value: Any) -> list[Any] | None:
    """A list, or the one that a text holds as JSON."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    return value if isinstance(value, list) else None


def _is_lines(file: IO[str]) -> bool:
    """Whether a file has a conversation on its first line and more after it, whatever its name ends in."""
    first, more = file.readline(LONGEST_LINE), file.read(1)
    file.seek(0)
    try:
        value = json.loads(first) if more and first.endswith("\n") else None
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and any(name in value for name in MESSAGES)


def _nested_list(value: Mapping[str, Any]) -> list[Any] | None:
    """The conversations of a file that has them under one key."""
    lists = [items for items in value.values() if isinstance(items, list) and items and isinstance(items[0], dict)]
    return next((items for items in lists if any(isinstance(items[0].get(name), list) for name in MESSAGES)), None)


def _paths(name: str) -> list[Path]:
    path = Path(expand_home(name))
    if path.is_dir():
        if files := sorted(one for one in path.rglob("*") if one.suffix in SUFFIXES and one.is_file()):
            return files
        raise UserError(f"folder '{name}' has no file ending in {', '.join(SUFFIXES)}")
    if not path.is_file():
        raise UserError(f"no file '{name}'")
    if path.suffix not in SUFFIXES:
        raise UserError(f"cannot read '{name}': its ending is not one of {', '.join(SUFFIXES)}")
    return [path]
