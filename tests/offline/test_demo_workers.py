"""A demonstration trains its models in parallel, with a fixed number of threads, and shows the time left."""

from __future__ import annotations

import sys
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import pytest

from upshot.core.files import write_jsonl
from upshot.core.threads import thread_count
from upshot.offline.demo import quickstart, workers
from upshot.offline.demo.workers import Progress, Workers, how_far, start_workers


def ended(value: object) -> Future[object]:
    future: Future[object] = Future()
    future.set_result(value)
    return future


@pytest.mark.parametrize("cores", [1, 2])
def test_threads_do_not_depend_on_the_cores(cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "cores", lambda: cores)
    monkeypatch.setattr(workers, "_import_training", thread_count)  # the next test covers it
    before = thread_count()
    with start_workers(Progress(quiet=True)) as pair:
        assert pair.here == (cores == 1)
        assert pair.run("warm start", 0.3, [thread_count]) == [2], "alone"
        assert pair.run("training", 0.6, [thread_count, thread_count]) == [1, 1], "side by side"
    assert thread_count() == before


def test_a_worker_ends_with_the_demonstration_and_preloads_what_a_job_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    deaths: list[None] = []
    monkeypatch.setattr(workers, "die_with_parent", lambda: deaths.append(None))
    workers._import_training()
    assert deaths and "upshot.run.run" in sys.modules


def test_every_row_of_the_table_is_from_its_own_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Evaluated(Exception):
        """Ends the demonstration before its table is printed."""

    def stop(outcomes: dict[str, str], title: str) -> None:
        raise Evaluated(outcomes)

    monkeypatch.setattr(workers, "cores", lambda: 1)
    monkeypatch.setattr(quickstart, "train_stage", lambda run, quiet: Path(run.run_dir))
    monkeypatch.setattr(quickstart, "_evaluate", lambda recipe, checkpoint: checkpoint.name)
    monkeypatch.setattr(quickstart, "make_table", stop)
    with pytest.raises(Evaluated) as ended:
        quickstart.quickstart([f"run_dir={tmp_path}"], quiet=True)
    [outcomes] = ended.value.args
    assert outcomes == {name: name.replace(" ", "-") for name in quickstart.STAGES} and [*outcomes] == [
        *quickstart.STAGES
    ]


def test_a_failure_of_one_job_is_raised() -> None:
    with pytest.raises(ValueError, match="could not convert"):
        Workers(None, Progress(quiet=True)).run("training", 0.6, [partial(float, "1"), partial(float, "one")])


def test_the_slower_run_reports_the_progress_of_a_stage(tmp_path: Path) -> None:
    for name, count in (("fast", 8), ("slow", 2)):
        (tmp_path / name).mkdir()
        write_jsonl(tmp_path / name / "metrics.jsonl", [{"step": step, "reward/mean": 0.5} for step in range(count)])
    steps = [(tmp_path / "fast", 10), (tmp_path / "slow", 10)]
    assert how_far([], steps) == (0.2, "step 8 and 2 of 10, reward 0.50 and 0.50")
    assert how_far([], [(tmp_path / "not begun", 10)]) == (0.0, "step 0 of 10")
    assert how_far([ended(1), Future()], []) == (0.5, "1 of 2")


def test_the_progress_line_shows_the_time_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.monotonic", lambda: 130.0)
    progress = Progress(quiet=False, began=100.0, done=0.3)
    progress.show("training", 0.6, 0.5, "step 40 of 80")
    assert capsys.readouterr().out == "   training: step 40 of 80, about 20 s left\n"
    progress.show("training", 0.6, 0.55, "step 44 of 80")
    assert capsys.readouterr().out == "", "in a log, a line every ten seconds"
    Progress(quiet=False, began=129.9).show("warm start", 0.3, 0.0, "step 0 of 120")
    assert capsys.readouterr().out == "   warm start: step 0 of 120\n", "too early to tell"


def test_an_unchanged_line_is_not_printed_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    progress = Progress(quiet=False, began=100.0)
    for now in (100.0, 120.0, 140.0):
        monkeypatch.setattr("time.monotonic", lambda now=now: now)
        progress.show("warm start", 0.3, 0.0, "step 0 of 120")
    assert capsys.readouterr().out == "   warm start: step 0 of 120\n"
