"""Thinned curves keep what the eye needs: ends, extremes, gaps."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from upshot.run.report.curves import pack, read_curves, thin

points = st.lists(st.none() | st.floats(-1e6, 1e6), min_size=1, max_size=400).map(
    lambda values: [(float(step), value) for step, value in enumerate(values)]
)


@given(points, st.integers(5, 60))
def test_thinning_keeps_ends_extremes_and_gaps(curve: list[tuple[float, float | None]], limit: int) -> None:
    kept = thin(curve, limit)
    assert len(kept) <= max(limit, 5)
    assert kept[0] == curve[0] and kept[-1] == curve[-1]
    assert kept == sorted(kept, key=lambda point: point[0])
    values = [value for _, value in curve if value is not None]
    left = [value for _, value in kept if value is not None]
    if values:
        assert (min(left), max(left)) == (min(values), max(values))
    assert any(value is None for _, value in kept) == any(value is None for _, value in curve)


def write(path: Path, *rows: dict[str, object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_null_is_a_gap_and_an_absent_key_is_not(tmp_path: Path) -> None:
    rows = [
        {"step": 1, "phase": "rl", "reward/mean": 0.1, "eval/score": 0.5},
        {"step": 2, "phase": "rl", "reward/mean": None},
        {"step": 3, "phase": "rl", "reward/mean": 0.3, "note": "text is no metric"},
    ]
    curves = read_curves(write(tmp_path / "m.jsonl", *rows))
    assert curves.series["rl"] == {"reward/mean": [(1, 0.1), (2, None), (3, 0.3)], "eval/score": [(1, 0.5)]}
    packed = pack([("rl", key, curves.series["rl"][key]) for key in curves.series["rl"]], 100, {})
    assert [(curve["key"], curve["n"], curve["missing"]) for curve in packed["curves"]] == [
        ("reward/mean", 3, 1),
        ("eval/score", 1, 0),
    ]


def test_a_resumed_run_uses_its_later_values(tmp_path: Path) -> None:
    rows = [{"step": 1, "a": 1.0}, {"step": 2, "a": 2.0}, {"step": 2, "a": 2.5}]
    curves = read_curves(write(tmp_path / "m.jsonl", *rows))
    assert curves.series[""]["a"] == [(1, 1.0), (2, 2.5)]
    assert curves.rewritten == 1


def test_nan_and_infinity_are_missing_and_counted(tmp_path: Path) -> None:
    curves = read_curves(write(tmp_path / "m.jsonl", {"step": 1, "a": float("nan")}, {"step": 2, "a": float("inf")}))
    assert curves.series[""]["a"] == [(1, None), (2, None)]
    assert curves.not_finite == 2


def test_curves_with_the_same_steps_share_one_column() -> None:
    curve = [(float(step), 0.5) for step in range(9)]
    packed = pack([("", "a", curve), ("", "b", list(curve)), ("", "c", curve[:3])], 100, {})
    assert len(packed["steps"]) == 2


def test_a_reason_is_counted_zero_at_steps_where_it_did_not_occur(tmp_path: Path) -> None:
    rows = [
        {"step": 1, "phase": "rl", "reward/missing": 0},
        {"step": 2, "phase": "rl", "reward/missing": 1, "missing/judge: timeout": 3},
        {"step": 2, "phase": "eval", "eval/score": 0.5},
    ]
    curves = read_curves(write(tmp_path / "m.jsonl", *rows))
    assert curves.series["rl"]["missing/judge: timeout"] == [(1, 0.0), (2, 3.0)]
    assert curves.missing_reasons() == {"judge: timeout": 3.0}
    assert curves.total("time/step") is None


def test_time_and_tokens_add_up_across_phases_if_they_are_logged(tmp_path: Path) -> None:
    rows = [
        {"phase": "warm-start", "step": 1, "time/step": 2.0}, {"phase": "warm-start", "step": 2, "time/step": 1.0},
        {"phase": "rl", "step": 1, "time/step": 5.0, "train/tokens": 100}, {"phase": "rl", "step": 1, "eval/x": 1.0},
        {"phase": "rl", "step": 2, "time/step": None, "train/tokens": 50}, {"phase": "rl", "step": 3, "time/step": 4.0},
    ]  # fmt: skip
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    curves = read_curves(path)
    assert curves.sums("train/tokens") == {("rl", 1): 100, ("rl", 2): 150, ("rl", 3): 150}
    axes = {"time": curves.sums("time/step"), "tokens": curves.sums("train/tokens")}
    wanted = [("warm-start", "time/step", curves.series["warm-start"]["time/step"]), ("rl", "x", [(1, 0.5), (3, 0.6)])]
    packed = pack(wanted, 100, axes)
    assert packed["time"] == [[2, 3], [8, 12]] and packed["tokens"] == [[None, None], [100, 150]]
