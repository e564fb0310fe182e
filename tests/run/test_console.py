"""What a person reads while a run goes on."""

from __future__ import annotations

import pytest

from upshot.run.console import PlainReporter, step_line

LINE = {
    "time/step": 1.93,
    "time/sample": 0.8,
    "time/futures": 0.31,
    "time/judges": 0.12,
    "time/learn": 0.61,
    "time/save": 0.0,
    "time/sampled_per_s": 12_345.0,
    "time/learned_per_s": 101_000.0,
    "time/mfu": 0.41,
    "time/memory_gib": 23.14,
    "missing/timeout": 2.0,
    "missing/error": 1.0,
    "time/dollars": 0.42,
}


def test_one_line_tells_where_the_time_tokens_memory_and_money_of_a_step_went() -> None:
    assert step_line(LINE) == (
        "1.93 s (sample 0.8, futures 0.31, judges 0.12, learn 0.61) · tokens/s 12.3k sampled, 101k learned, MFU 41% · "
        "23.1 GiB · 3 missing · $0.42"
    )
    assert "23.1 GiB of 25.0 planned" in step_line({**LINE, "time/memory_planned_gib": 25.0})
    assert step_line({"eval/reward/mean": 0.5}) == "", "a line of nothing but an evaluation"


def test_a_log_has_the_numbers_of_a_step_and_its_times_below_them(capsys: pytest.CaptureFixture[str]) -> None:
    reporter = PlainReporter(every_s=0.0)
    reporter.phase("rl", 2)
    reporter.step("rl", 1, {"reward/mean": 0.5, **LINE})
    reporter.step("rl", 2, {"eval/reward/mean": 0.5})
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("rl 1/2  reward/mean=0.5") and lines[2].startswith("    1.93 s (sample")
    assert lines[3:] == ["rl 2/2  eval/reward/mean=0.5"]
