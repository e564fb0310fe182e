"""A plain text or number can stand for a section, and nothing of it is lost when an override is laid over it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from upshot.config.layers import COMMAND_LINE, put, untag
from upshot.config.load import load_recipe
from upshot.config.recipe import Recipe
from upshot.config.short_form import ShortForm
from upshot.config.validation import models_in
from upshot.core.errors import UserError


def laid(tmp_path: Path, below: str, above: str) -> Any:
    """One file laid over another."""
    (tmp_path / "below.yaml").write_text(f"task: slots\n{below}\n")
    (tmp_path / "above.yaml").write_text(f"extends: below.yaml\n{above}\n")
    return load_recipe(tmp_path / "above.yaml")


def given(*overrides: str) -> Any:
    """The overrides laid over a recipe without sections."""
    return load_recipe({"task": "slots"}, overrides).recipe


def test_an_override_inside_a_section_keeps_its_short_form() -> None:
    train = given("train.kl=0.1", "train.kl.estimator=k2").train
    assert (train.kl.weight, train.kl.estimator) == (0.1, "k2")
    train = given("train.importance=truncate", "train.importance.high=4").train
    assert (train.importance.rule, train.importance.high) == ("truncate", 4)
    credit = given("credit=turns", "credit.gamma=0.9").credit
    assert (credit.by, credit.gamma) == ("turns", 0.9)
    engine = given("model.engine=vllm", "model.engine.memory=0.5").model.engine
    assert (engine.name, engine.memory) == ("vllm", 0.5)
    advantage = given("train.advantage=reinforce++", "train.advantage.baseline=group").train.advantage
    assert (advantage.name, advantage.options) == ("reinforce++", {"baseline": "group"})
    clip = given("train.clip=0.1", "train.clip.high=0.3").train.clip
    assert (clip.low, clip.high) == (0.1, 0.3)
    judge = given("models.judge=http://host/v1#one", "models.judge.temperature=0").models["judge"]
    assert (judge.url, judge.model, judge.temperature) == ("http://host/v1", "one", 0)


def short_forms(model: type[BaseModel] = Recipe, path: tuple[str, ...] = ()) -> Iterator[tuple[str, type[ShortForm]]]:
    """Every section of a recipe that a plain value may stand for."""
    for name, info in model.model_fields.items():
        for section in models_in(info.annotation):
            below = (*path, name, *(["some"] if getattr(info.annotation, "__origin__", None) is dict else []))
            if issubclass(section, ShortForm) and getattr(info.annotation, "__origin__", None) is not list:
                if section.short_key:
                    yield ".".join(below), section
                yield from short_forms(section, below)


ALONE = {"weight": 0.1, "high": 0.3, "by": "turns", "rule": "truncate"}
"""The key that a plain value sets, by section; in all others it is a name."""
NAMES = {"schedule": "cosine", "optimizer": "adamw-8bit", "engine": "vllm", "futures": "none"}


@pytest.mark.parametrize(("path", "section"), list(short_forms()), ids=lambda x: x if isinstance(x, str) else "")
def test_no_section_loses_its_short_form_to_an_override_inside_it(path: str, section: type[ShortForm]) -> None:
    value = ALONE.get(section.short_key, NAMES.get(path.rpartition(".")[2], "some-name"))
    data: dict[str, Any] = {}
    put(data, path, value, COMMAND_LINE)
    put(data, f"{path}.more", 1, COMMAND_LINE)
    below: Any = untag(data)
    for part in path.split("."):
        below = below[part]
    assert below == section.expand(value) | {"more": 1}


def test_a_value_that_is_not_a_section_is_not_lost_to_an_override_inside_it() -> None:
    with pytest.raises(UserError, match=r"'reward.overlong.penalty' is inside 'reward.overlong', which is 'score'"):
        given("reward.overlong=score", "reward.overlong.penalty=-2")
    assert given("warm_start=null", "warm_start.steps=3").warm_start.steps == 3


def test_futures_none_stays_none() -> None:
    futures = given("futures=none", "futures.samples=2").futures
    assert (futures.name, futures.samples) == ("none", 2)


def test_a_short_form_over_a_section_sets_only_its_own_key() -> None:
    train = given("train.kl.estimator=k2", "train.kl=0.1").train
    assert (train.kl.weight, train.kl.estimator) == (0.1, "k2")
    train = given("train.optimizer.betas=[0.9, 0.95]", "train.optimizer=adamw-8bit").train
    assert (train.optimizer.name, train.optimizer.betas) == ("adamw-8bit", (0.9, 0.95))
    train = given("train.schedule.warmup_steps=5", "train.schedule=cosine").train
    assert (train.schedule.name, train.schedule.warmup_steps) == ("cosine", 5)


def test_a_new_name_drops_the_options_of_the_old_one() -> None:
    engine = given("model.engine={name: vllm, memory: 0.5}", "model.engine=upshot").model.engine
    assert engine.memory is None
    advantage = given("train.advantage={name: grpo, scale: step}", "train.advantage=rloo").train.advantage
    assert advantage.options == {}
    judge = given("models.judge={model: openai/a, temperature: 0}", "models.judge=openai/b").models["judge"]
    assert judge.temperature is None


@pytest.mark.parametrize(
    "below, above",
    [
        ("credit: turns", "credit: {gamma: 0.9}"),
        ("credit: {gamma: 0.9}", "credit: turns"),
    ],
)
def test_a_file_over_another_keeps_what_it_does_not_mention(below: str, above: str, tmp_path: Path) -> None:
    loaded = laid(tmp_path, below, above)
    assert (loaded.recipe.credit.by, loaded.recipe.credit.gamma) == ("turns", 0.9)
    said = {"turns": "credit.by", "gamma": "credit.gamma"}
    for word, key in said.items():
        assert loaded.origin(key) == ("below.yaml" if word in below else "above.yaml")
    assert loaded.origin("credit.split") == "default"


def test_the_same_text_twice_stays_a_text(tmp_path: Path) -> None:
    assert laid(tmp_path, "name: one\nsandbox: local", "name: one\nsandbox: local").recipe.name == "one"


def test_a_mapping_in_a_call_is_laid_over_a_short_form() -> None:
    recipe = load_recipe({"task": "slots", "train": {"kl": 0.1}}, {"train": {"kl": {"where": "reward"}}}).recipe
    assert (recipe.train.kl.weight, recipe.train.kl.where) == (0.1, "reward")
