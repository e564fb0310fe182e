"""`upshot runs`: the run folders as a table, and which of them may be removed or moved."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from upshot.cli import main
from upshot.run.folder import RunFolder


def make_run(folder: Path, lr: float, state: str, rewards: list[float]) -> Path:
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(f"name: {folder.name}\nseed: 0\ntrain:\n  lr: {lr}\n")
    status = {"state": state, "step": len(rewards), "steps": 9, "started": 1.7e9 + len(rewards)}
    (folder / "status.json").write_text(json.dumps(status))
    lines = [{"phase": "rl", "step": step, "reward/mean": value} for step, value in enumerate(rewards, 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "runs" / "first", 0.1, "finished", [0.5, 0.25])
    killed = make_run(tmp_path / "runs" / "second", 0.2, "running", [0.5, 0.75, 0.9])
    (killed / "lock").write_text(json.dumps({"pid": 2**22 + 1, "host": socket.gethostname()}))
    return tmp_path / "runs"


def test_runs_are_listed_with_state_step_result_and_differences(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs"]) == 0
    head, first, second = capsys.readouterr().out.splitlines()
    assert head.split()[:6] == ["run", "state", "step", "result", "last", "best"]
    assert first.split()[:6] == ["runs/first", "finished", "2/9", "reward/mean", "0.25", "0.5"]
    assert "killed" in second and "3/9" in second and "train.lr=0.2" in second and "seed" not in second
    assert main(["runs", "--json", "runs"]) == 0
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["differences"] for row in told] == [{"train.lr": "0.1"}, {"train.lr": "0.2"}]


def test_a_run_whose_process_is_alive_is_listed_as_running(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (runs / "second" / "lock").write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
    main(["runs"])
    assert "running" in capsys.readouterr().out


def test_only_runs_are_removed_or_moved(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "rm", "runs/first"]) == 2, "cannot ask for confirmation"
    assert main(["runs", "rm", "runs", "--yes"]) == 2 and main(["runs", "rm"]) == 2
    assert main(["runs", "mv", "runs/first", "runs/second/metrics.jsonl"]) == 2
    assert main(["runs", "mv", "runs/second", "runs/paper/main"]) == 0
    assert (runs / "paper" / "main" / "recipe.yaml").is_file() and not (runs / "second").exists()
    assert main(["runs", "mv", "runs/first", "runs/paper"]) == 0 and (runs / "paper" / "first").is_dir()
    with RunFolder(runs / "paper" / "main").lock(print):
        assert main(["runs", "rm", "runs/paper/main", "--yes"]) == 2, "a run writes it"
    assert main(["runs", "rm", "runs/paper/main", "runs/paper/first", "--yes"]) == 0
    assert list((runs / "paper").iterdir()) == []
    assert "is not a run folder" in capsys.readouterr().err


@pytest.mark.parametrize("inside", ["runs/second", "runs/second/checkpoints/old", "runs/first/older"])
def test_a_run_is_not_moved_into_a_run(runs: Path, capsys: pytest.CaptureFixture[str], inside: str) -> None:
    (runs.parent / "recipe.yaml").write_text("")  # a project folder of the user's, which contains all runs
    assert main(["runs", "mv", "runs/first", inside]) == 2
    assert f"/{'/'.join(inside.split('/')[:2])}' is a run folder; choose a place" in capsys.readouterr().err
    assert main(["runs", "mv", "runs/first", "runs/elsewhere"]) == 0


def test_a_note_and_tags_are_kept_shown_and_filtered_by(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "tag", "runs/first", "baseline", "keep", "keep"]) == 0
    assert main(["runs", "note", "runs/first", "the", "reward counts twice"]) == 0
    assert main(["runs", "untag", "runs/first", "keep", "never there"]) == 0
    assert RunFolder(runs / "first").notes == {"note": "the reward counts twice", "tags": ["baseline"]}
    capsys.readouterr()
    assert main(["runs", "--tag", "baseline", "--json"]) == 0
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["run"], row["tags"], row["note"]) for row in told] == [
        ("runs/first", ["baseline"], "the reward counts twice")
    ]
    assert main(["runs", "--tag", "keep"]) == 0
    assert "no runs tagged 'keep' in runs" in capsys.readouterr().out
    assert main(["runs", "tag", "runs/first"]) == 2 and main(["runs", "note", "runs/nowhere", "x"]) == 2
    (runs / "first" / "notes.json").write_text('{"tags": 3')
    assert RunFolder(runs / "first").notes == {"note": "", "tags": []}, "a damaged file says nothing"
