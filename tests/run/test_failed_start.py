"""A failed start does not block the next one: the same command works once the cause is fixed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training.workshop import recipe
from upshot.cli import main
from upshot.core.errors import UserError
from upshot.run.folder import RunFolder
from upshot.run.run import train
from upshot.training import bundle as loaded


def broken(*args: object) -> None:
    raise UserError("the weights are torn")


def test_a_failed_start_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(loaded, "load_policy", broken)
        with pytest.raises(UserError, match="torn"):
            train(recipe(tmp_path / "run"))
    assert list(tmp_path.iterdir()) == []


def test_a_failed_command_works_when_it_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = ["hidden=16", "layers=1", "heads=2", "mlp=16"]
    words = ["train", "quickstart", *(f"model.tiny.{word}" for word in tiny), "warm_start=null", "train.steps=0"]
    words += [f"run_dir={tmp_path}/run", "--quiet"]
    with monkeypatch.context() as patch:
        patch.setattr(loaded, "load_policy", broken)
        assert main(words) == 2
    assert not (tmp_path / "run").exists()
    assert main(words) == 0


def test_the_folder_of_a_killed_start_is_reused(tmp_path: Path) -> None:
    left = RunFolder.create(recipe(tmp_path, steps=3))
    left.write_status("running")
    (tmp_path / "notes.txt").write_text("mine")
    again = RunFolder.create(recipe(tmp_path, steps=4))
    assert again.recipe.train.steps == 4 and not (tmp_path / "status.json").exists()
    assert (tmp_path / "notes.txt").read_text() == "mine"
    again.drop_failed_start()
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"], "what is not the run's stays"


@pytest.mark.parametrize("name", ["recipe.yaml", "checkpoints", "samples", "config.json"])
def test_a_folder_with_files_of_something_else_is_refused_and_keeps_them(name: str, tmp_path: Path) -> None:
    precious = tmp_path / name if "." in name else tmp_path / name / "precious.txt"
    precious.parent.mkdir(exist_ok=True)
    precious.write_text("mine")
    with pytest.raises(UserError, match=f"has '{name}', which does not come from a run; choose another run_dir"):
        RunFolder.create(recipe(tmp_path, steps=3))
    assert precious.read_text() == "mine"


def test_the_folder_of_a_start_in_progress_is_not_reused(tmp_path: Path) -> None:
    settings = recipe(tmp_path / "run")
    with RunFolder.create(settings).lock(print), pytest.raises(UserError, match="is being written"):
        RunFolder.create(settings)


def test_a_folder_with_a_finished_step_is_never_removed(tmp_path: Path) -> None:
    folder = RunFolder.create(recipe(tmp_path / "run"))
    folder.append_metrics("rl", 1, {"loss": 1.0})
    folder.drop_failed_start()
    assert folder.lines("rl", 1)
    with pytest.raises(UserError, match="--resume"):
        RunFolder.create(recipe(tmp_path / "run"))
