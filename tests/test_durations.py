"""`make test` runs the tests recorded as shorter than 0.6 s; the recording stays within limits."""

from __future__ import annotations

import ast
import sys
from itertools import groupby
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.durations import (
    LONG_S,
    Clock,
    FileRecord,
    Pace,
    Recorder,
    Recording,
    balance,
    read_recording,
    split,
    write_recording,
)

ROOT = Path(__file__).parent.parent
CORES, STYLE_AND_TYPES_S, COLLECTION_S = 2, 60, 20
SHORT_LIMIT_S, FULL_LIMIT_S = 240, 600
"""The targets on two quiet cores."""


def test_the_fixtures_a_test_shares_count_towards_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.durations.LONG_S", 1.0)
    own = {"x::a": 0.2, "x::b": 0.3, "x::c": 1.5, "x::d": 0.1}
    recording = split(own, {"x::a": ["server"], "x::b": ["cheap"], "x::d": ["cheap"]}, {"server": 4.0, "cheap": 0.5})
    assert recording.long == {"x::a": 4.2, "x::c": 1.5}
    assert recording.files == {"x": FileRecord(round(0.3 + 0.1 + 0.5, 1), 6.6, 4)}
    assert (recording.short_s, recording.all_s) == (0.9, 6.6)


def test_a_file_recorded_again_replaces_only_its_own_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tests.durations.ROOT", tmp_path)
    monkeypatch.setattr("tests.durations.RECORD", tmp_path / "durations.json")
    (tmp_path / "x").touch()
    (tmp_path / "y").touch()
    old = Recording(
        {"x::a": 3.0, "y::b": 4.0, "gone::c": 5.0},
        {"x": FileRecord(0.0, 3.0, 1), "y": FileRecord(1.0, 5.0, 2), "gone": FileRecord(0.0, 5.0, 1)},
    )
    write_recording(old.with_files_of(split({"x::a": 0.5, "x::d": 2.0}, {}, {})))
    assert read_recording() == Recording(
        {"x::d": 2.0, "y::b": 4.0}, {"x": FileRecord(0.5, 2.5, 2), "y": FileRecord(1.0, 5.0, 2)}
    )


@given(st.lists(st.tuples(st.floats(0, 9), st.integers(1, 5)), max_size=30))
def test_an_order_for_two_processes_keeps_every_test_and_files_together(
    files: list[tuple[float, int]],
) -> None:
    names = [f"{file}::{test}" for file, (_, tests) in enumerate(files) for test in range(tests)]
    recording = Recording({}, {str(file): FileRecord(spent, 0.0, n) for file, (spent, n) in enumerate(files)})
    order = balance(names, recording, long_too=False)
    assert sorted(order) == list(range(len(names)))
    sequence = [names[at].partition("::")[0] for at in order]
    assert len(list(groupby(sequence))) == len(files), "no file is begun twice"


def test_both_processes_begin_with_the_files_that_take_longest() -> None:
    seconds = {"a": 1.0, "b": 9.0, "c": 8.0, "d": 2.0, "e": 0.5, "f": 0.0}
    recording = Recording({}, {name: FileRecord(0.0, spent, 1) for name, spent in seconds.items()})
    order = balance([f"{name}::test" for name in seconds], recording, long_too=True)
    assert ["abcdef"[at] for at in order] == ["b", "a", "e", "c", "d", "f"]


def test_a_new_file_is_not_placed_last() -> None:
    recording = Recording({}, {"a": FileRecord(0.0, 12.0, 3), "b": FileRecord(0.0, 1.0, 9)})
    order = balance(["a::1", "b::1", "new::1", "new::2"], recording, long_too=True)
    assert [["a::1", "b::1", "new::1", "new::2"][at] for at in order] == ["a::1", "b::1", "new::1", "new::2"]


def test_skipped_tests_keep_their_record_and_a_run_cut_short_writes_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.durations.ROOT", tmp_path)
    monkeypatch.setattr("tests.durations.RECORD", tmp_path / "durations.json")
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    (tmp_path / "page").touch()
    old = Recording({"page::a": 9.0}, {"page": FileRecord(1.0, 10.0, 2)})
    write_recording(old)
    recorder = Recorder(heavy=(), own={"page::a": 0.0, "page::b": 0.0, "x::c": 2.0}, skipped={"page::a", "page::b"})
    recorder.pytest_sessionfinish(pytest.ExitCode.INTERRUPTED)
    assert read_recording() == old
    recorder.pytest_sessionfinish(pytest.ExitCode.TESTS_FAILED)
    assert read_recording() == Recording(
        {"page::a": 9.0, "x::c": 2.0}, {"page": FileRecord(1.0, 10.0, 2), "x": FileRecord(0.0, 2.0, 1)}
    )


def test_seconds_are_converted_to_the_reference_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    pace = Pace()
    assert pace.slower == 1.0
    pace.recent.extend([3 * Pace.REFERENCE_S] * 99)
    with monkeypatch.context() as patched:  # the clock of a recording is restored when this test itself is recorded
        patched.setattr("tests.durations.PACE", pace)
        clock = Clock()
        assert pace.slower == pytest.approx(3)
        patched.setattr("tests.durations._cpu", lambda: (clock.cpu + 6.0, clock.children + 3.0))
        patched.setattr("tests.durations.monotonic", lambda: clock.wall + 9.0)
        assert clock.seconds() == pytest.approx(3.0), "a third of what was counted here; nothing was slept"


def test_a_server_that_ends_is_not_charged_for_work_that_tests_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:  # the clock of a recording is restored when this test itself is recorded
        patched.setattr("tests.durations.os.cpu_count", lambda: 2)
        patched.setattr("tests.durations._queued", lambda: 0.0)
        patched.setattr("tests.durations.PACE", Pace())
        clock = Clock()
        patched.setattr("tests.durations._cpu", lambda: (clock.cpu, clock.children + 30.0))
        patched.setattr("tests.durations.monotonic", lambda: clock.wall + 0.5)
        assert clock.seconds() == pytest.approx(2 * 0.5), "two cores, half a second"


def test_the_recorder_runs_beside_fixtures_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A conftest makes pytest look up its plugins by hash."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "conftest.py").write_text(
        "import pytest\n@pytest.fixture(scope='module')\ndef shop():\n    return 3\n"
    )
    (tmp_path / "inner" / "test_it.py").write_text("def test_it(shop):\n    assert shop == 3\n")
    (tmp_path / "test_bare.py").write_text("def test_bare(tmp_path):\n    pass\n")
    recorder = Recorder(heavy=())
    monkeypatch.setattr(recorder, "pytest_sessionfinish", lambda: None)
    outer = ("cacheprovider", "timeout", "xdist", "faulthandler")
    words = ["-q", *(f"-pno:{name}" for name in outer), "--rootdir", str(tmp_path), str(tmp_path)]
    assert pytest.main(words, plugins=[recorder]) == 0
    assert set(recorder.own) == {"inner/test_it.py::test_it", "test_bare.py::test_bare"}
    assert recorder.uses["inner/test_it.py::test_it"] == ["inner::shop"] and "inner::shop" in recorder.shared


def test_a_recorded_test_carries_the_mark_and_a_new_one_does_not(request: pytest.FixtureRequest) -> None:
    long = read_recording().long
    for item in request.session.items:
        assert (item.get_closest_marker("long") is not None) == (item.nodeid in long)


def test_the_recording_fits_the_limits() -> None:
    recording = read_recording()
    assert all(seconds >= LONG_S for seconds in recording.long.values())
    before = STYLE_AND_TYPES_S / CORES + COLLECTION_S
    assert before + recording.short_s / CORES <= SHORT_LIMIT_S
    assert before + recording.all_s / CORES <= FULL_LIMIT_S
    assert max(recording.long.values()) <= FULL_LIMIT_S / 10, "one test that a second core cannot help with; split it"


def test_most_of_what_is_recorded_still_exists() -> None:
    long = read_recording().long
    functions = {path: _functions(ROOT / path) for path in {name.partition("::")[0] for name in long}}
    gone = [name for name in long if name.split("::")[-1].partition("[")[0] not in functions[name.partition("::")[0]]]
    assert len(gone) <= len(long) / 10, f"record the tests again (make durations): {gone}"


def _functions(path: Path) -> set[str]:
    if not path.exists():
        return set()
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def test_short_and_long_tests_together_are_all_tests() -> None:
    targets = (ROOT / "Makefile").read_text()
    assert '-m "$(NOT_HERE) and not long"' in targets and '-m "$(NOT_HERE) and long"' in targets
    commands = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line.startswith("make ")]
    assert commands == ["make test", "make test-long"], "continuous integration runs both, each once"
