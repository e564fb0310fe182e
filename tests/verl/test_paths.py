"""Paths in a recipe mean the same in every process, wherever Ray starts it."""

from __future__ import annotations

from pathlib import Path

import pytest

from upshot.config.load import load_recipe
from upshot.config.recipe import TinyConfig
from upshot.models.tiny import tiny_model, tiny_tokenizer
from upshot.verl.checks.node import NodeRequirements, check_node
from upshot.verl.config import compose
from upshot.verl.paths import list_paths, make_absolute


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    tokenizer = tiny_tokenizer(["a"])
    tiny_model(TinyConfig(hidden=16, layers=1, heads=2, mlp=32), tokenizer, 0).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "slots").mkdir()  # the same as the task's name, by chance
    (tmp_path / "rows.jsonl").write_text("{}\n")
    (tmp_path / "judge").mkdir()
    (tmp_path / "judge/rubric.j2").write_text("x")
    return tmp_path


def test_relative_paths_are_made_absolute_and_other_words_stay(here: Path) -> None:
    metrics = "reward.metrics=[{name: verifier}, {name: judged, rubric: judge/rubric.j2, weight: 1}]"
    words = ["model.path=model", "models.user=./model", "models.judge=http://127.0.0.1:1/v1", metrics]
    words += ["warm_start=null", "train.method=sft", "train.data=rows.jsonl"]
    recipe = make_absolute(load_recipe("quickstart", words).recipe)
    assert recipe.model.path == str(here / "model") and recipe.models["user"].model == str(here / "model")
    assert recipe.reward.metrics[1].options["rubric"] == str(here / "judge/rubric.j2")
    assert recipe.train.data == str(here / "rows.jsonl")
    assert recipe.task.name == "slots" and recipe.models["judge"].url == "http://127.0.0.1:1/v1"
    assert {path for _, path in list_paths(recipe)} >= {str(here / "model"), str(here / "rows.jsonl")}
    assert make_absolute(recipe) == recipe


def test_our_names_of_models_reach_verl_as_the_folders_they_stand_for(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`smollm2-135m` is our name for a folder that is converted at its first use."""
    monkeypatch.setattr("upshot.models.smollm2.smollm2_folder", lambda: here / "model")
    recipe = make_absolute(load_recipe("quickstart", ["warm_start=null", "model.path=smollm2-135m"]).recipe)
    assert compose(recipe).value("actor_rollout_ref.model.path") == str(here / "model")
    hub = make_absolute(load_recipe("quickstart", ["warm_start=null", "model.path=Qwen/Qwen3-4B"]).recipe)
    assert hub.model.path == "Qwen/Qwen3-4B"


def test_a_node_without_a_helpers_folder_or_a_task_file_says_so_with_the_key(here: Path) -> None:
    files = (("models.user.model", str(here / "elsewhere")), ("task.data", str(here / "rows.jsonl")))
    (said,) = check_node(NodeRequirements("", "", files=files))
    assert "elsewhere (`models.user.model`) is not there" in said
