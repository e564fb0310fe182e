"""Files and folders that are written completely or not at all: JSON lines, JSON files, folders; and users' texts.

All JSON lines are read and written here. Only a line feed ends a line: texts of people and models contain U+2028,
U+0085 and other characters that `str.splitlines` treats as line ends. A last line without a line feed counts if it is a
complete object. If not, it is torn, as a killed process leaves it: readers skip it, and the next writer removes it.

Every value can be written: numpy numbers, lone surrogates, NaN (as null) and any other object (as its text).

Files and folders are written under a temporary name, synced and renamed, so a power cut leaves the old one or the new.
What this does not do: keep two processes from writing the same file (`run/lock.py` does).
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from upshot.core.errors import UserError, near

log = logging.getLogger(__name__)

JsonObject = dict[str, Any]
DEPTH = 50
"""Values nested deeper than this are written as text."""
_HOME = re.compile(r"^((?:--)?[\w.-]+=|)(?:~|\$HOME\b|\$\{HOME\})(?=/|$)")
TAIL_BYTES = 1 << 16
LARGE_BITS = 10_000
"""Larger integers cannot be written as decimals in Python."""


@dataclass(frozen=True, slots=True)
class JsonLine:
    """A line of a file that is not blank."""

    number: int
    """From 1."""
    data: bytes
    row: JsonObject | None
    """Its object; None if it holds none."""


def iter_jsonl(file: IO[bytes]) -> Iterator[JsonLine]:
    """The lines of a file that was opened as bytes."""
    for number, data in enumerate(file, 1):  # a file of bytes knows the line feed only
        if data.strip():
            yield JsonLine(number, data, parse_json_line(data))


def parse_json_line(data: bytes) -> JsonObject | None:
    """The object of a line; None if the line holds no object."""
    try:
        row = json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def read_jsonl(path: Path) -> list[JsonObject]:
    """The objects of a file that we wrote; damaged lines are skipped, with a warning unless it is the torn last one."""
    if not path.is_file():
        return []
    with path.open("rb") as file:
        return [line.row for line in _whole(file, path) if line.row is not None]


def read_user_jsonl(file: IO[bytes], name: str) -> Iterator[JsonObject]:
    """All objects of a user's file; `UserError` for a line that is not an object."""
    for line in iter_jsonl(file):
        if line.row is None:
            start = line.data[:60].decode(errors="replace").strip()
            try:
                line.data.decode()
                fault = "is not JSON, or not an object"
            except UnicodeDecodeError:
                fault = "is not UTF-8; save the file as UTF-8"
            raise UserError(f"{name}, line {line.number} {fault}: {start!r}")
        yield line.row


def append_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Append lines to a file in one write, after removing a torn last line."""
    data = b"".join(map(dump_json_line, rows))
    repair_jsonl(path)
    with path.open("ab") as file:
        file.write(data)


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a file of just these lines; its folder is created."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.writelines(map(dump_json_line, rows))


def filter_jsonl(path: Path, wanted: Callable[[JsonObject], bool]) -> None:
    """Remove unwanted lines from a file in one step: a reader sees the old content or the new."""
    if not path.is_file():
        return
    with path.open("rb") as old:
        kept = (line.data for line in _whole(old, path) if line.row is not None and wanted(line.row))
        write_atomic(path, (data if data.endswith(b"\n") else data + b"\n" for data in kept))


def repair_jsonl(path: Path) -> None:
    """Make a file end with a complete line: a last line without its line feed gets one, a torn line is removed."""
    if not path.is_file():
        return
    with path.open("r+b") as file:
        place, tail = file.seek(0, os.SEEK_END), b""
        while place and b"\n" not in tail:  # from the end, piece by piece: files of a long run are large
            size = min(TAIL_BYTES, place)
            place = file.seek(place - size)
            tail = file.read(size) + tail
        line = tail[tail.rfind(b"\n") + 1 :]
        if line and parse_json_line(line) is not None:
            file.seek(0, os.SEEK_END)
            file.write(b"\n")
        elif line:
            file.truncate(place + len(tail) - len(line))


def dump_json_line(row: Mapping[str, Any]) -> bytes:
    """The line of an object, with its line feed."""
    try:
        text = json.dumps(row, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        text = json.dumps(to_json_value(row), ensure_ascii=False)
    # A lone surrogate has no UTF-8; written as a backslash and its number it is the JSON escape of the same character.
    return text.encode("utf-8", "backslashreplace") + b"\n"


def _whole(file: IO[bytes], path: Path) -> Iterator[JsonLine]:
    for line in iter_jsonl(file):
        if line.row is not None:
            yield line
        elif line.data.endswith(b"\n"):  # else it is torn
            log.warning("%s: line %d is damaged and left out", path, line.number)


def to_json_value(value: Any, above: tuple[int, ...] = ()) -> Any:
    """A value as JSON can hold it; `above`: the ids of the values that contain it."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return value if value.bit_length() < LARGE_BITS else hex(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if id(value) in above or len(above) > DEPTH:
        return _text(value)
    above = (*above, id(value))
    with suppress(Exception):  # raised by a user's own class: its text is enough
        if isinstance(value, Mapping):
            return {_text(key): to_json_value(item, above) for key, item in value.items()}
        if isinstance(value, list | tuple | set | frozenset):
            return [to_json_value(item, above) for item in value]
        if callable(getattr(type(value), "tolist", None)):  # numbers and arrays of numpy and torch
            return to_json_value(value.tolist(), above)
    return _text(value)


def _text(value: Any) -> str:
    try:
        return str(value)
    except Exception:
        return f"<{type(value).__name__}>"


def expand_home(text: str) -> str:
    """A text with a leading `~`, `$HOME` or `${HOME}` replaced, as a shell does; also after `key=`."""
    return _HOME.sub(lambda match: match[1] + str(Path.home()), text)


def suggest_neighbour(path: Path) -> str:
    """The tail of an error message: a file beside a path with a similar name; empty if there is none."""
    names = {entry.name for entry in path.parent.iterdir()} if path.parent.is_dir() else set()
    nearest = near(path.name, names - {path.name})
    return f"; did you mean '{path.parent / nearest}'?" if nearest else ""


def read_text(path: Path, what: str = "file") -> str:
    """The text of a user's file; `UserError` if it cannot be read or is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{what} '{path}' is not UTF-8 (byte {error.start}); save it as UTF-8") from None
    except OSError as error:
        raise UserError(f"cannot read {what} '{path}': {(error.strerror or str(error)).lower()}") from None


def check_writable(path: Path, option: str = "--out") -> None:
    """Refuse a file that cannot be written, before any work is done. Nothing is left behind."""
    probe = path.with_name(f".{path.name}.probe")
    made = [folder for folder in path.parents if not folder.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(None, "is a directory")
        if path.exists():
            path.open("ab").close()
        probe.touch()
        probe.unlink()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UserError(f"cannot write '{path}': {reason}; choose another {option}") from None
    finally:
        for folder in made:
            with suppress(OSError):
                folder.rmdir()


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file, whatever the value holds."""
    write_atomic(path, dump_json_line(value))


def write_atomic(path: Path, content: bytes | Iterable[bytes]) -> None:
    """Write a file in one step: a reader sees the old content or the new. Its folder is created."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".partial")
    with temporary.open("wb") as file:
        file.writelines([content] if isinstance(content, bytes) else content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def fsync_all(*paths: Path) -> None:
    """Wait until files and folders are on the disk."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def open_to_readers(folder: Path) -> None:
    """Let everybody who may read a folder read its weights, too: safetensors writes them for the owner alone."""
    for path in folder.rglob("*.safetensors"):
        path.chmod(path.stat().st_mode | folder.stat().st_mode & 0o666)


_FULL = re.compile(r"PytorchStreamWriter|inline_container|iostream|\(os error (27|28|122)\)")
"""Parts of the errors of torch, tokenizers and safetensors about a file that could not be written completely."""


def write_folder(final: Path, write: Callable[[Path], None], what: str = "", way_out: str = "free some space") -> None:
    """Have `write` fill a folder, which gets its name when it is on the disk; an incomplete one there is replaced.

    If it cannot be written, for example because the disk is full, that is a `UserError`, whatever the library raises.
    Its message says `what` the folder is, and the way out.
    """
    partial = final.with_name(f".partial-{final.name}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        write(partial)
        open_to_readers(partial)
        fsync_all(*partial.rglob("*"), partial)
        shutil.rmtree(final, ignore_errors=True)
        os.replace(partial, final)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError):
            raise UserError(f"cannot write {what}'{final}': {error.strerror or error}; {way_out}") from error
        if not isinstance(error, UserError) and (full := _FULL.search(repr(error))):
            reason = os.strerror(int(full[1] or errno.ENOSPC))
            raise UserError(f"cannot write {what}'{final}': {reason}; {way_out}") from error
        raise
    fsync_all(final.parent)
