"""A preparation that is killed after every few writes ends with the same result as an uninterrupted one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.offline.logs.test_prepare import SMALL, log
from upshot.cli import main
from upshot.offline.job import Journal

__all__ = ["log"]


class Killed(BaseException):
    """Stands for kill -9: nothing catches it."""


def test_killed_at_any_write_and_run_again_the_result_is_the_same(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["logs", "prepare", str(log), "--out", "whole", *SMALL]) == 0
    append, left = Journal.append, [0]

    def mortal(self: Journal, *lines: Any) -> None:
        append(self, *lines)
        left[0] -= 1
        if left[0] == 0:
            raise Killed

    monkeypatch.setattr(Journal, "append", mortal)
    kills = 0
    while kills < 40:
        left[0] = 9
        try:
            assert main(["logs", "prepare", str(log), "--out", "parts", *SMALL]) == 0
            break
        except (Killed, BaseExceptionGroup):
            kills += 1
    assert kills > 1
    whole, parts = (json.loads(Path(name, "validity.json").read_text()) for name in ("whole", "parts"))
    assert parts == whole
    assert Path("parts/validity.jsonl").read_text().count("\n") == 6, "nothing was played twice"
