"""Shared memory that is left behind is removed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from upshot.verl import process


def test_only_new_segments_of_known_programs_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "SHM", tmp_path)
    for name in ("psm_left", "dataset.bin"):
        (tmp_path / name).write_bytes(b"x")
        os.utime(tmp_path / name, (1, 1))  # nobody writes there any more
    assert process.sweep(since=0) == ["psm_left"]
    assert [path.name for path in tmp_path.iterdir()] == ["dataset.bin"]
    (tmp_path / "psm_before").write_bytes(b"x")
    assert process.sweep(since=2**40) == []
