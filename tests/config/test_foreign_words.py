"""Terms of other projects, dashes before keys, tabs: the error says how to write it here."""

from __future__ import annotations

from pathlib import Path

import pytest

from upshot.cli import main
from upshot.config.load import load_recipe
from upshot.config.other_names import FOREIGN_KEYS, FOREIGN_VALUES
from upshot.config.recipe import Recipe
from upshot.config.validation import keys_of
from upshot.core.errors import UserError


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["learning_rate=1e-4"], "unknown key 'learning_rate'; here it is train.lr"),
        (["train.learning_rate=1e-4"], "unknown key 'train.learning_rate'; here it is train.lr"),
        (["method=grpo"], "unknown key 'method'; here it is train.method=rl train.advantage=grpo"),
        (["train.method=grpo"], "train.method = 'grpo': here it is train.method=rl train.advantage=grpo"),
        (["temperature=1"], "here it is episode.temperature or eval.temperature"),
        (["trian.lr=1"], "did you mean 'train'?"),
    ],
)
def test_a_term_of_another_project_is_answered_with_ours(words: list[str], line: str) -> None:
    with pytest.raises(UserError) as told:
        load_recipe("quickstart", words)
    assert line in str(told.value)


def test_the_suggested_keys_exist() -> None:
    known = set(keys_of(Recipe))
    assert {key for key in FOREIGN_KEYS.values() if key.split()[0] not in known | {"task.file"}} == set()
    for said in FOREIGN_VALUES["train.method"].values():
        load_recipe("quickstart", said.split())


def test_dashes_before_a_key_and_a_mistyped_verb_get_one_clear_line(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["train", "quickstart", "--train.lr", "1e-4"], ["tran", "quickstart"]):
        with pytest.raises(SystemExit) as left:
            main(words)
        assert left.value.code == 2
    told = capsys.readouterr().err
    assert "write train.lr=1e-4" in told and "unknown verb 'tran'; did you mean 'train'?" in told


def test_a_tab_is_shown_with_a_caret_below_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tab.yaml"
    file.write_text("name: x\ntrain:\n\tlr: 1\n")
    assert main(["recipe", "show", str(file)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert "a tab; YAML is indented with spaces (line 3, column 1)" in lines[0]
    assert lines[1:] == ["    →lr: 1", "    ^"]


def test_a_name_on_the_command_line_drops_the_options_that_the_file_gave_the_old_one() -> None:
    user = load_recipe("collabllm-grpo", ["futures.user.name=scripted"]).recipe.futures.user
    assert user is not None and user.options == {}
    words = ["futures.user.lines=[hello]", "futures.user.name=scripted"]  # in either order
    for order in (words, words[::-1]):
        user = load_recipe("collabllm-grpo", order).recipe.futures.user
        assert user is not None and user.options == {"lines": ["hello"]}


def test_a_classmate_that_is_never_asked_need_not_exist() -> None:
    assert "peer" in load_recipe("classmate-mini").recipe.needed_models
    assert "peer" not in load_recipe("classmate-mini", ["futures=none"]).recipe.needed_models
    own = load_recipe("classmate-mini", ["futures=none", "reward.metrics=[my_pkg.mod:metric]"]).recipe
    assert "peer" in own.needed_models  # the user's own code may ask for any


def test_a_missing_run_of_a_shipped_recipe_names_the_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "classmate-mini", "--dry-run"]) == 2
    assert "train it first: upshot train classmate-mini-peer" in capsys.readouterr().err
    assert main(["train", "classmate-mini", "futures=none", "--dry-run"]) == 0
