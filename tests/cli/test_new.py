"""`upshot new`: what it writes is complete, runs as it is, and its own test passes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from upshot.cli import main
from upshot.cli.new import FILES, class_name, render

ROOT = Path(__file__).parent.parent.parent


class Tally:
    """A plugin that records the outcome of each test."""

    def __init__(self) -> None:
        self.outcomes: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self.outcomes.append(report.outcome)


def test_what_is_written_passes_its_own_tests(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in FILES:
        assert main(["new", kind, f"own_{kind}", "--dir", str(tmp_path)]) == 0
        assert f"python -m pytest test_own_{kind}.py" in capsys.readouterr().out
    # As in the user's folder, where tests import their modules by name.
    monkeypatch.setattr(sys, "path", list(sys.path))
    outer = ("cacheprovider", "timeout", "xdist", "faulthandler")  # what the surrounding pytest keeps for itself
    words = ["-q", *(f"-pno:{plugin}" for plugin in outer), "--rootdir", str(tmp_path), str(tmp_path)]
    tally = Tally()
    try:
        assert pytest.main(words, plugins=[tally]) == 0, capsys.readouterr().out
    finally:
        for name in [name for name in sys.modules if name.removeprefix("test_").startswith("own_")]:
            del sys.modules[name]
    assert tally.outcomes == ["passed"] * 16


@pytest.mark.parametrize("kind", sorted(FILES))
def test_nothing_is_overwritten(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = next(iter(FILES[kind].values())).format(name="mine_too")
    (tmp_path / name).write_text("precious")
    assert main(["new", kind, "mine_too", "--dir", str(tmp_path)]) == 2
    assert "already exists; choose another name" in capsys.readouterr().err
    assert (tmp_path / name).read_text() == "precious" and len(list(tmp_path.iterdir())) == 1


def test_where_pytest_is_not_installed_the_command_installs_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["new", "metric", "short", "--dir", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert f"test     cd {tmp_path} && python -m pytest test_short.py" in said, "commands work where one stands"
    assert f"try      cd {tmp_path} && upshot score" in said
    monkeypatch.chdir(tmp_path)
    assert main(["new", "metric", "tiny"]) == 0
    assert "test     python -m pytest test_tiny.py" in capsys.readouterr().out
    monkeypatch.setattr("upshot.cli.new.find_spec", lambda name: None)
    assert main(["new", "metric", "brief", "--dir", str(tmp_path)]) == 0
    assert "pip install pytest && python -m pytest test_brief.py" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my-task", "'my-task' is not a valid module name"),
        ("Task", "use lower-case letters"),
        ("class", "'class' is not a valid module name"),
        ("random", "Python would import an installed module"),
    ],
)
def test_names_that_cannot_be_imported_are_refused(
    name: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["new", "task", name, "--dir", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


def test_the_new_name_replaces_the_templates_name_everywhere() -> None:
    assert class_name("my_first_task") == "MyFirstTask"
    for kind in FILES:
        for text in render(kind, "harbour").values():
            assert "my_name" not in text and "MyName" not in text


def test_what_is_written_follows_the_projects_style(tmp_path: Path) -> None:
    for kind in FILES:
        for file, text in render(kind, f"own_{kind}").items():
            (tmp_path / file).write_text(text)
    ruff = Path(sys.executable).with_name("ruff")
    if not ruff.exists():
        pytest.skip("ruff is not installed")
    words = [str(ruff), "check", "--config", str(ROOT / "pyproject.toml"), "--ignore", "I001", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
