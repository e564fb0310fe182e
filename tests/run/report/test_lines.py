"""Half-written logs are read as far as they are complete."""

from __future__ import annotations

import json
import math
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from upshot.run.report.lines import LogTail, number, shorten


def test_a_truncated_last_line_is_skipped_and_reported(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n\n{"step": 2}\n{"step": 3, "re')
    log = LogTail(path)
    assert [row["step"] for _, _, row in log.read()] == [1, 2]
    assert log.cut and not log.skipped
    assert "last line is incomplete" in (log.sentence() or "")


def test_unreadable_lines_in_the_middle_are_counted_by_number(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\nnot json\n[1, 2]\n\xff\xfe\n{"step": 2}')
    log = LogTail(path)
    assert [row["step"] for _, _, row in log.read()] == [1, 2]
    assert log.skipped == [2, 3, 4] and not log.cut


def test_a_file_that_is_not_there_has_no_lines(tmp_path: Path) -> None:
    assert list(LogTail(tmp_path / "none.jsonl").read()) == []


@given(st.lists(st.dictionaries(st.text(), st.integers() | st.text())), st.integers(0, 400))
def test_any_truncation_of_a_log_keeps_all_whole_lines(rows: list[dict[str, int | str]], cut: int) -> None:
    import tempfile

    whole = "".join(json.dumps(row) + "\n" for row in rows).encode()
    kept = whole[: max(0, len(whole) - cut)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.jsonl"
        path.write_bytes(kept)
        found = list(LogTail(path).read())
    lines = kept.count(b"\n")
    assert [row for _, _, row in found][:lines] == rows[:lines]
    for offset, length, row in found:
        assert json.loads(kept[offset : offset + length]) == row


@given(st.lists(st.dictionaries(st.text(), st.integers() | st.text())), st.lists(st.integers(0, 300), max_size=5))
def test_a_log_that_grows_piece_by_piece_is_read_like_a_complete_one(
    rows: list[dict[str, int | str]], cuts: list[int]
) -> None:
    import tempfile

    whole = "".join(json.dumps(row) + "\n" for row in rows).encode()
    found = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.jsonl"
        log = LogTail(path)
        for cut in [*sorted(cuts), len(whole)]:
            path.write_bytes(whole[:cut])
            log.file = None  # the same file to the reader, although written anew
            found += [row for _, _, row in log.read()]
    assert found == rows and not log.cut


def test_a_log_that_was_rewritten_is_read_from_its_beginning(tmp_path: Path) -> None:
    path, other = tmp_path / "m.jsonl", tmp_path / "other.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n')
    log = LogTail(path)
    assert not log.is_rewritten() and len(list(log.read())) == 2 and not log.is_rewritten()
    other.write_text('{"step": 1}\n{"step": 7}\n{"step": 8}\n')
    other.replace(path)
    assert log.is_rewritten()
    assert [row["step"] for _, _, row in log.read()] == [1, 7, 8]


def test_numbers_that_are_not_finite_are_missing() -> None:
    assert [number(value) for value in (1, 2.5, True)] == [1.0, 2.5, 1.0]
    assert not any(number(value) for value in (math.nan, math.inf, 10**400, None, "3"))


@given(st.floats(allow_nan=False, allow_infinity=False, min_value=-1e200, max_value=1e200))
def test_shortening_keeps_six_digits(value: float) -> None:
    assert abs(shorten(value) - value) <= 1e-5 * abs(value)
