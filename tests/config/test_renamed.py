"""Keys that had other names are refused, wherever they stand, with the new name in the message."""

from __future__ import annotations

from pathlib import Path

import pytest

from upshot.api.reward import check_options
from upshot.cli import make_parser
from upshot.config.layers import flatten
from upshot.config.load import find_recipe, load_recipe
from upshot.config.other_names import RENAMED_KEYS
from upshot.config.recipe import Recipe
from upshot.core.errors import UserError

KEYS = {key for key, _ in flatten(Recipe(task={"name": "slots"}).model_dump())}


@pytest.mark.parametrize("old", RENAMED_KEYS)
def test_an_old_key_on_the_command_line_is_refused_with_the_new_one(old: str) -> None:
    with pytest.raises(UserError, match=rf"^command line: {old} is {RENAMED_KEYS[old]} now$"):
        load_recipe("quickstart", [f"{old}=1"])


@pytest.mark.parametrize("old", RENAMED_KEYS)
def test_an_old_key_in_a_file_is_refused_with_the_new_one(old: str, tmp_path: Path) -> None:
    section, _, key = old.partition(".")
    file = tmp_path / "mine.yaml"
    file.write_text(f"extends: quickstart\n{section}: {f'{{{key}: 1}}' if key else 1}\n")
    with pytest.raises(UserError, match=rf"mine\.yaml: {old} is {RENAMED_KEYS[old]} now$"):
        load_recipe(file)


def test_all_old_keys_of_a_file_are_named_at_once(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text("task: slots\ntrain: {kl: 0.1, kl_in: reward, save_every: 3}\n")
    with pytest.raises(UserError, match=r"train\.kl_in is train\.kl\.where now, train\.save_every is train\.save\.eve"):
        load_recipe(file)


def test_the_new_keys_are_keys_and_the_old_ones_are_none() -> None:
    assert set(RENAMED_KEYS.values()) <= KEYS and not set(RENAMED_KEYS) & KEYS


def test_no_shipped_recipe_has_an_old_key() -> None:
    folder = find_recipe("quickstart").parent
    for file in [*folder.glob("*.yaml"), *folder.glob("settings/*.yaml")]:
        load_recipe(file, ["task=slots"] if file.parent.name == "settings" else [])


def test_the_old_words_of_calls_and_options_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match=r"'window' of upshot\.reward is 'rounds' now"):
        check_options({"window": 2})
    for words in (["score", "file.jsonl", "--window", "2"], ["data", "build", "--window", "2"]):
        with pytest.raises(SystemExit):
            make_parser(words).parse_args(words)
        assert "argument --window: it is --rounds 2 now" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        make_parser(["verify"]).parse_args(["verify", "file.jsonl", "--undecided", "believe"])
    assert "it is --verdict profile, believe or strict now" in capsys.readouterr().err
