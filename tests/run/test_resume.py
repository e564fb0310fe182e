"""`upshot train --resume RUN key=value`: length and limits may change; what the finished steps depend on may not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training.workshop import metrics, recipe
from upshot.cli import main
from upshot.config.load import dump_recipe
from upshot.core.errors import UserError
from upshot.run.folder import RunFolder
from upshot.run.resume import resumed_recipe
from upshot.run.run import train

HELPED = {
    "models": {"user": "scripted:tests.training.helpers:customer"},
    "futures": {"samples": 1, "rounds": 1, "user": {"name": "llm", "model": "user"}},
}


def test_a_spent_budget_can_be_raised_and_a_finished_run_extended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(recipe(tmp_path / "straight", warm=False, steps=3, more=HELPED))
    run = tmp_path / "run"
    broke = {**HELPED, "budget": {"max_calls": 13}}
    (tmp_path / "recipe.yaml").write_text(dump_recipe(recipe(run, warm=False, steps=2, more=broke)))
    assert main(["train", str(tmp_path / "recipe.yaml"), "--quiet"]) == 2
    assert "budget.max_calls=" in capsys.readouterr().err
    assert [line["step"] for line in metrics(run)] == [1]
    assert main(["train", "--resume", str(run), "budget.max_calls=1000", "--quiet"]) == 0
    assert RunFolder.open(run).recipe.budget.max_calls == 1000, "the folder's recipe is what the run is made by"
    assert main(["train", "--quiet", "--resume", str(run), "train.steps=3"]) == 0
    reward = [line["reward/mean"] for line in metrics(run)]
    assert reward == [line["reward/mean"] for line in metrics(tmp_path / "straight")]


def test_changes_that_are_not_allowed_are_refused_with_the_reason_and_those_that_are(tmp_path: Path) -> None:
    folder = RunFolder.create(recipe(tmp_path / "run"))
    for override in ("train.lr=1", "seed=3", "task.rows_per_split=5", "reward.metrics.verifier.weight=2"):
        with pytest.raises(UserError, match=r"cannot change .*the rest would not match them.*train\.steps") as raised:
            resumed_recipe(folder, [override])
        assert override.partition("=")[0].rpartition(".")[2] in str(raised.value)
    free = ["train.steps=9", "eval.every=2", "trackers=[tensorboard]", "reward.max_missing=1", "models.judge=policy"]
    changed = resumed_recipe(folder, [*free, "train.token_budget=8", "train.lr=1e-3"])
    assert (changed.train.steps, changed.eval.every, changed.trackers) == (9, 2, ["tensorboard"])
    assert folder.recipe.train.steps == 6, "nothing is written before the run goes on"


def test_a_recipe_together_with_resume_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    RunFolder.create(recipe(tmp_path / "run"))
    assert main(["train", "quickstart", "--resume", str(tmp_path / "run")]) == 2
    assert "leave out 'quickstart'" in capsys.readouterr().err


def test_the_log_ratio_as_a_loss_is_refused_because_it_has_no_gradient(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"train\.kl\.estimator = 'k1'.*no gradient.*k2 or k3"):
        recipe(tmp_path / "run", kl={"weight": 0.1, "estimator": "k1"})
