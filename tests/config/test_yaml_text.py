"""YAML within bounds: unbounded nesting or repetition is refused at once, with its place."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from upshot.cli import main
from upshot.config.load import load_recipe, read_value
from upshot.config.yaml_text import DEEPEST, parse_yaml
from upshot.core.errors import UserError
from upshot.run.report.compare import settings_of

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BOMB, r"more than 100,000 values once aliases are filled in \(line 6"),
        ("task: " + "[" * 5000 + "]" * 5000, rf"nested more than {DEEPEST} levels deep \(line 1"),
        ("".join(" " * n + "a:\n" for n in range(2000)), rf"nested more than {DEEPEST} levels deep \(line 65"),
        ("task: &t {name: *t}", r"'\*t' stands inside what it names \(line 1"),
        ("task: *nobody", "undefined alias"),
    ],
    ids=["alias bomb", "brackets", "indented", "itself", "unknown alias"],
)
def test_a_recipe_of_unbounded_size_is_refused_with_its_line(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=f"mine.yaml is not valid YAML: .*{message}"):
        load_recipe(str(file))


def test_every_yaml_reader_refuses_unbounded_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match=r"override 'task': .* is not valid YAML: nested more than"):
        read_value("task", "[" * 500)
    assert settings_of(BOMB) == {} and settings_of("[" * 500) == {}
    (tmp_path / "recipe.yaml").write_text(BOMB)
    assert main(["recipe", "show", str(tmp_path)]) == 2
    assert len(capsys.readouterr().err) < 500


def test_ordinary_aliases_and_merge_keys_are_read_as_yaml_reads_them() -> None:
    text = "base: &b {lr: 1e-5, steps: 2}\none: *b\ntwo: {<<: *b, steps: 3}\nthree: [&x 1, *x]\n"
    assert parse_yaml(text) == {
        "base": {"lr": 1e-5, "steps": 2}, "one": {"lr": 1e-5, "steps": 2}, "two": {"lr": 1e-5, "steps": 3},
        "three": [1, 1],
    }  # fmt: skip
    assert parse_yaml(yaml.safe_dump({"a": [{"b": [1, None, "c"]}] * 50})) == {"a": [{"b": [1, None, "c"]}] * 50}
