"""Half-written logs are read as far as they go."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from upshot.run.report.lines import SkippedLines, number, read_objects, shorten


def test_a_cut_last_line_is_skipped_and_said(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n\n{"step": 2}\n{"step": 3, "re')
    skipped = SkippedLines()
    assert [row["step"] for _, _, row in read_objects(path, skipped)] == [1, 2]
    assert skipped.cut and not skipped.lines
    assert "last line is incomplete" in (skipped.sentence("m.jsonl") or "")


def test_unreadable_lines_in_the_middle_are_counted_by_number(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\nnot json\n[1, 2]\n\xff\xfe\n{"step": 2}')
    skipped = SkippedLines()
    assert [row["step"] for _, _, row in read_objects(path, skipped)] == [1, 2]
    assert skipped.lines == [2, 3, 4] and not skipped.cut


def test_a_file_that_is_not_there_has_no_lines(tmp_path: Path) -> None:
    assert list(read_objects(tmp_path / "none.jsonl", SkippedLines())) == []


@given(st.lists(st.dictionaries(st.text(), st.integers() | st.text())), st.integers(0, 400))
def test_any_cut_of_a_log_keeps_all_whole_lines(rows: list[dict[str, int | str]], cut: int) -> None:
    import tempfile

    whole = "".join(json.dumps(row) + "\n" for row in rows).encode()
    kept = whole[: max(0, len(whole) - cut)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.jsonl"
        path.write_bytes(kept)
        found = list(read_objects(path, SkippedLines()))
    lines = kept.count(b"\n")
    assert [row for _, _, row in found][:lines] == rows[:lines]
    for offset, length, row in found:
        assert json.loads(kept[offset : offset + length]) == row


def test_numbers_that_are_not_finite_are_missing() -> None:
    assert [number(value) for value in (1, 2.5, True, float("nan"), float("inf"), None, "3")] == [
        1.0,
        2.5,
        1.0,
        None,
        None,
        None,
        None,
    ]


@given(st.floats(allow_nan=False, allow_infinity=False, min_value=-1e200, max_value=1e200))
def test_shortening_keeps_six_digits(value: float) -> None:
    assert abs(shorten(value) - value) <= 1e-5 * abs(value)
