"""`make test` runs the tests that take less than a second, as recorded; what is recorded stays within limits."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from tests.durations import LONG_S, Recorder, read_recording, split

ROOT = Path(__file__).parent.parent
CORES, STYLE_AND_TYPES_S = 2, 60
SHORT_LIMIT_S, FULL_LIMIT_S = 250, 800
"""What a complete recording showed. The goals are 240 and 600 seconds."""


def test_a_test_is_long_with_the_fixtures_that_it_shares() -> None:
    own = {"a": 0.2, "b": 0.3, "c": 1.5, "d": 0.1}
    recording = split(own, {"a": ["server"], "b": ["cheap"], "d": ["cheap"]}, {"server": 4.0, "cheap": 0.5})
    assert recording.long == {"a": 4.2, "c": 1.5}
    assert (recording.short_s, recording.all_s, recording.tests) == (round(0.3 + 0.1 + 0.5), round(6.6), 4)


def test_the_recorder_runs_beside_fixtures_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A conftest makes pytest look its plugins up by hash."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "conftest.py").write_text(
        "import pytest\n@pytest.fixture(scope='module')\ndef shop():\n    return 3\n"
    )
    (tmp_path / "inner" / "test_it.py").write_text("def test_it(shop):\n    assert shop == 3\n")
    (tmp_path / "test_bare.py").write_text("def test_bare(tmp_path):\n    pass\n")
    recorder = Recorder()
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
    assert STYLE_AND_TYPES_S / CORES + recording.short_s / CORES <= SHORT_LIMIT_S
    assert STYLE_AND_TYPES_S / CORES + recording.all_s / CORES <= FULL_LIMIT_S
    assert max(recording.long.values()) <= FULL_LIMIT_S / 4, "one test that a second core cannot help with; split it"


def test_most_of_what_is_recorded_still_exists() -> None:
    long = read_recording().long
    functions = {path: _functions(ROOT / path) for path in {name.partition("::")[0] for name in long}}
    gone = [name for name in long if name.split("::")[-1].partition("[")[0] not in functions[name.partition("::")[0]]]
    assert len(gone) <= len(long) / 10, f"record the tests again (make durations): {gone}"


def _functions(path: Path) -> set[str]:
    if not path.exists():
        return set()
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def test_the_short_tests_and_the_long_ones_are_all_of_them() -> None:
    targets = (ROOT / "Makefile").read_text()
    assert '-m "$(NOT_HERE) and not long"' in targets and '-m "$(NOT_HERE) and long"' in targets
    commands = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line.startswith("make ")]
    assert commands == ["make test", "make test-long"], "continuous integration runs both, each once"
