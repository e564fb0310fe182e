"""What is printed while a run goes on."""

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


def test_one_line_shows_the_time_tokens_memory_and_cost_of_a_step() -> None:
    assert step_line(LINE) == (
        "1.93 s (sample 0.8, futures 0.31, judges 0.12, learn 0.61) · tokens/s 12.3k sampled, 101k learned, MFU 41% · "
        "23.1 GiB · 3 missing · $0.42"
    )
    assert step_line({"eval/reward/mean": 0.5}) == "", "a line of nothing but an evaluation"


def test_a_log_has_one_line_per_step_with_its_times_and_the_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    reporter = PlainReporter()
    reporter.phase("rl", 101)
    reporter.step("rl", 1, {"reward/mean": 0.5, **LINE})
    reporter.show_reply(1, "which\nsize?", "a\x1b[31m big one", "reward 0.5")
    reporter.step("rl", 101, {"eval/reward/mean": 0.5})
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("rl 1/101  reward/mean=0.5") and "1.93 s (sample" in lines[1]
    assert lines[1].endswith("ETA 3.2 min")
    assert lines[2] == "    step 1, reward 0.5: 'which size?' → 'a [31m big one'"
    assert lines[3:] == ["rl 101/101  eval/reward/mean=0.5"]


def test_a_log_shows_the_progress_of_a_long_step(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    reporter = PlainReporter()
    reporter.phase("rl", 2)
    for done, clock[0] in ((1, 5.0), (2, 25.0), (3, 30.0), (4, 46.0)):
        reporter.show_progress(done, 128)
    assert capsys.readouterr().out == "rl: 2 steps\n    2 of 128 replies\n    4 of 128 replies\n"
