"""An append-only file of JSON lines that survives kill -9: what it holds is finished, and stays so.

A line is on the disk (fsync) before `append` returns. A half-written last line, left by a crash, is cut off when the
journal is opened again. One process at a time holds the file (flock), so two resumed runs cannot interleave.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from upshot.core.errors import UserError
from upshot.core.files import dump_json_line, read_jsonl, repair_jsonl, write_jsonl


class Journal:
    """Finished work, line by line, behind a first line that says with which settings it was done."""

    def __init__(
        self,
        path: Path,
        settings: Mapping[str, Any] | None,
        keep: Callable[[Mapping[str, Any]], bool] | None = None,
    ) -> None:
        """Open or begin a journal; one that was begun with other settings is a `UserError`.

        With settings None the file has no first line of settings: every line is finished work. Lines that `keep`
        refuses are taken out of it.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._settings = settings
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._file)
            raise UserError(f"another process is writing {path}; wait for it, or use another --out") from error
        try:
            self.lines = self._recover(settings)
            """What was in the journal when it was opened, without the settings."""
            if keep is not None and not all(map(keep, self.lines)):
                self.lines = [line for line in self.lines if keep(line)]
                self._rewrite()
        except BaseException:
            self.close()
            raise

    def append(self, line: Mapping[str, Any]) -> None:
        """Add one line; when this returns it is on the disk."""
        self.extend([line])

    def extend(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Add lines; when this returns they are on the disk."""
        data = b"".join(map(dump_json_line, lines))
        while data:
            data = data[os.write(self._file, data) :]
        os.fsync(self._file)

    def close(self) -> None:
        """Let go of the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _rewrite(self) -> None:
        """Put just `lines` into the file, in one step: a reader sees the old content or the new."""
        if self._settings is not None:
            raise ValueError("a journal with settings keeps all its lines")
        other = self.path.with_name(f".{self.path.name}.new")
        write_jsonl(other, self.lines)
        handle = os.open(other, os.O_RDWR | os.O_APPEND)
        os.fsync(handle)
        fcntl.flock(handle, fcntl.LOCK_EX)
        os.replace(other, self.path)
        os.close(self._file)
        self._file = handle
        _sync_folder(self.path.parent)

    def _recover(self, settings: Mapping[str, Any] | None) -> list[dict[str, Any]]:
        repair_jsonl(self.path)
        lines = read_jsonl(self.path)
        if settings is None:
            return lines
        wanted = json.loads(dump_json_line({"settings": dict(settings)}))
        if not lines or (len(lines) == 1 and lines[0] != wanted):  # nothing was done with the other settings
            os.ftruncate(self._file, 0)
            self.append(wanted)
            _sync_folder(self.path.parent)
            return []
        if lines[0] != wanted:
            changed = _changed(lines[0].get("settings", {}), wanted["settings"])
            raise UserError(
                f"{self.path} was begun with other settings ({changed}); give the same ones to resume, or another --out"
            )
        return lines[1:]


def _changed(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    keys = [key for key in sorted({*old, *new}) if old.get(key) != new.get(key)]
    return ", ".join(f"{key}: {old.get(key)!r}, now {new.get(key)!r}" for key in keys[:3])


def _sync_folder(folder: Path) -> None:
    """Make a new file's name durable, too."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
