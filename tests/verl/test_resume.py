"""What a resumed run on verl keeps and what may change."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from upshot.config.load import load_recipe
from upshot.config.recipe import Recipe
from upshot.core.errors import UserError
from upshot.run.folder import RunFolder
from upshot.verl.checkpoints import WORDS, begin_folder, reopen_run, skip_first_validation
from upshot.verl.config import compose
from upshot.verl.plan import ClusterPlace

THEIRS = ["trainer.n_gpus_per_node=2", "+trainer.new=1"]


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    own = ["task.rows_per_split=64", "warm_start=null", "model.path=/model", "eval.every=2"]
    return load_recipe("quickstart", ["credit.by=reply", *own, f"run_dir={tmp_path / 'run'}"]).recipe


@pytest.fixture
def run(recipe: Recipe) -> RunFolder:
    folder = RunFolder.create(recipe)
    plan = compose(recipe, ClusterPlace(str(folder.path), 64, 20, 256), THEIRS)
    begin_folder(folder, recipe, plan, THEIRS)
    return folder


def save(folder: RunFolder, step: int, ranks: int = 2) -> None:
    actor = folder.checkpoints.path / f"global_step_{step}" / "actor"
    actor.mkdir(parents=True)
    for rank in range(ranks):
        (actor / f"model_world_size_{ranks}_rank_{rank}.pt").touch()
    (folder.checkpoints.path / "latest_checkpointed_iteration.txt").write_text(str(step))


def test_a_resumed_run_keeps_verls_settings_and_new_ones_win(run: RunFolder, recipe: Recipe) -> None:
    found, theirs, folder = reopen_run(run.path, ["train.steps=99", "trainer.n_gpus_per_node=4"])
    assert found.train.steps == 99 and folder.path == run.path
    assert theirs == [*THEIRS, "trainer.n_gpus_per_node=4"]
    plan = compose(found, ClusterPlace(str(run.path), 64, 20, 256), theirs)
    assert plan.ranks == 4 and plan.value("trainer.total_training_steps") == 99


def test_changes_that_would_make_it_another_run_are_refused_as_in_local_mode(run: RunFolder) -> None:
    with pytest.raises(UserError, match=r"--resume cannot change train\.lr"):
        reopen_run(run.path, ["train.lr=1"])


def test_the_changed_recipe_is_the_runs_from_then_on(run: RunFolder, recipe: Recipe) -> None:
    changed, theirs, _ = reopen_run(run.path, ["train.steps=99"])
    plan = compose(changed, ClusterPlace(str(run.path), 64, 20, 256), THEIRS)
    begin_folder(run, changed, plan, theirs)
    assert run.recipe.train.steps == 99
    assert json.loads((run.path / WORDS).read_text()) == theirs


def test_a_run_with_a_checkpoint_skips_the_first_evaluation_on_resume(run: RunFolder, recipe: Recipe) -> None:
    plan = compose(recipe, ClusterPlace(str(run.path), 64, 20, 256), THEIRS)
    assert skip_first_validation(plan, run).value("trainer.val_before_train") is True
    save(run, 4)
    assert skip_first_validation(plan, run).value("trainer.val_before_train") is False


def test_another_number_of_ranks_is_refused_before_verl_starts(run: RunFolder, recipe: Recipe) -> None:
    save(run, 4)
    plan = compose(recipe, ClusterPlace(str(run.path), 64, 20, 256), ["trainer.n_gpus_per_node=8"])
    with pytest.raises(UserError, match="saved by 2 ranks"):
        begin_folder(run, recipe, plan, [])
