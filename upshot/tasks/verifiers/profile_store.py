"""Row profiles: measured on first use, kept in a file beside the data, the same for every process that reads it.

A line of the file is `{"key", "kinds", …}`, or `{"key", "program"}`: a confirmed program of a row without a reference.
The key names the row's checks and the sandbox's version, so a change to either is measured again. The first profile of
a key counts: processes that measure at the same time agree, and a resumed run reads what the run before it read. A
confirmed program changes nothing by itself, since verdicts would then depend on timing; `measure_all` measures with it.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from upshot.core.files import append_jsonl, parse_json_line
from upshot.sandbox import version
from upshot.sandbox.outcome import Outcome, TestResult
from upshot.tasks.verifiers.profile import (
    CheckKind,
    RowChecks,
    RowProfile,
    decide,
    is_witness,
    measure,
    profile_by_form,
)

log = logging.getLogger(__name__)
VerdictMode = Literal["profile", "believe", "strict"]
FILE = ".upshot-profiles"
AT_ONCE = 16
"""Rows measured at once; the sandbox has its own queue."""


class Verdicts:
    """How the results of a row's checks become a verdict: by the row's profile, or by the plain look alone."""

    def __init__(self, mode: VerdictMode = "profile", file: Path | None = None) -> None:
        """file: where profiles are kept; None: in memory."""
        self.mode = mode
        self.file = file
        self._profiles: dict[str, RowProfile] = {}
        self._programs: dict[str, str] = {}
        """Confirmed programs of rows without a reference."""
        self._locks: dict[str, asyncio.Lock] = {}
        self._read = 0
        """Bytes of the file that have been read."""

    async def judge(self, checks: RowChecks, program: str) -> list[TestResult]:
        """The results of a program that count; none where every check of the row is broken."""
        unjudged = replace(checks.limits, judge_seconds=0)
        if self.mode == "believe":
            results = await checks.look(program, unjudged)
            return [result.believe() if result.outcome is Outcome.UNCONFIRMED else result for result in results]
        profile = await self.profile(checks)
        # Where nothing can be decided the judge is not asked; a row without a reference may still get to know better.
        is_judged = CheckKind.DECIDABLE in profile.kinds or profile.basis == "form"
        results = await checks.look(program, checks.limits if is_judged else unjudged)
        if is_witness(profile, results) and (key := key_of(checks)) not in self._programs:
            self._programs[key] = program
            self._append({"key": key, "program": program})
        return decide(results, profile, self.mode == "strict")

    async def profile(self, checks: RowChecks) -> RowProfile:
        """The profile of a row, measured now where nobody has."""
        key = key_of(checks)
        async with self._locks.setdefault(key, asyncio.Lock()):
            self._load()
            if key not in self._profiles and checks.reference is not None:
                await self._measure(key, checks, checks.reference, "reference")
        return self._profiles.get(key) or profile_by_form(checks)

    async def measure_all(self, rows: Sequence[RowChecks]) -> list[RowProfile]:
        """The profiles of many rows; those by form are refined where a program of the row was confirmed."""
        gate = asyncio.Semaphore(AT_ONCE)

        async def refine(checks: RowChecks) -> RowProfile:
            async with gate:
                profile, key = await self.profile(checks), key_of(checks)
                if profile.basis == "form" and (program := self._programs.get(key)):
                    await self._measure(key, checks, program, "program")
                return self._profiles.get(key, profile)

        return list(await asyncio.gather(*map(refine, rows)))

    async def _measure(self, key: str, checks: RowChecks, program: str, basis: str) -> None:
        """Measure and keep the profile; a fault of the sandbox is not kept, and the row is measured again next time."""
        profile = await measure(checks, program, basis)
        if (
            basis == "program" and profile is not None
        ):  # a policy wrote it: it may show more, but break or soften nothing
            kinds = zip(profile_by_form(checks).kinds, profile.kinds, strict=True)
            if any(new is not CheckKind.DECIDABLE and new is not old for old, new in kinds):
                return
        if profile is None:
            log.warning("row %s: the sandbox could not run its reference; only the code of checks is read", checks.name)
            return
        self._append({"key": key, **profile.to_dict()})
        kept = self._profiles.setdefault(key, profile)
        if kept.summary == "broken":
            log.warning("row %s is left out: its reference fails (%s)", checks.name, next(iter(kept.reasons.values())))

    def _load(self) -> None:
        """Read what this or another process has written since."""
        if self.file is None or not self.file.is_file():
            return
        with self.file.open("rb") as file:
            file.seek(self._read)
            for data in file:
                line = parse_json_line(data)
                self._read += len(data)
                if line is None:
                    continue
                if "program" in line:
                    self._programs.setdefault(line["key"], line["program"])
                else:
                    self._profiles.setdefault(line["key"], RowProfile.from_dict(line))

    def _append(self, line: dict[str, Any]) -> None:
        """Write a line, and read what others wrote before it: theirs count."""
        if self.file is None:
            return
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with open(self.file, "ab") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                self._load()
                if "program" in line or line["key"] not in self._profiles:
                    append_jsonl(self.file, [line])
        except OSError as error:
            log.warning("profiles are not saved: %s cannot be written (%s)", self.file, error.strerror)
            self.file = None


def profiles_beside(source: str) -> Path:
    """The file of profiles in the folder of a data source; of a Hub set, in the user's cache."""
    path = Path(source).expanduser()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "upshot"
    return (path if path.is_dir() else path.parent if path.is_file() else cache) / FILE


def profiles_of(task: Any) -> Path | None:
    """Where the profiles of a task's rows are kept; None where it reads no data."""
    sources = task.sources() if task is not None else []
    return profiles_beside(sources[0]) if sources else None


def key_of(checks: RowChecks) -> str:
    """What names a row's checks, and the sandbox that decides them."""
    text = json.dumps([version(), *checks.identity], ensure_ascii=False)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
