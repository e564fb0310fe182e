"""docs/own-task.md: its file is what `upshot new task` writes, its loop runs as pasted, its nouns are public."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import upshot
from upshot.cli import main
from upshot.cli.new import render

PAGE = (Path(__file__).parent.parent.parent / "docs" / "own-task.md").read_text()

SMALL = (
    *("model.tiny={hidden: 16, layers: 1, heads: 2, mlp: 32}", "task.size=16", "warm_start.steps=1", "eval.every=0"),
    *("train.steps=1", "train.prompts_per_step=2", "train.group_size=2", "--quiet"),
)


def test_the_whole_file_and_its_recipe_are_what_new_writes() -> None:
    files = render("task", "kiosk")
    assert f"```python\n# kiosk.py\n{files['kiosk.py']}```" in PAGE
    assert f"```yaml\n# kiosk.yaml\n{files['kiosk.yaml']}```" in PAGE


def test_the_loop_in_pieces_runs_as_pasted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (block,) = [text for text in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "Trainer" in text]
    monkeypatch.chdir(tmp_path)
    small = "shape={'hidden': 16, 'layers': 1, 'heads': 2, 'mlp': 32}, max_tokens=4"
    exec(compile(block.replace("max_tokens=4", small), "own-task.md", "exec"), {"__name__": "pasted"})
    assert len(capsys.readouterr().out.splitlines()) >= 3
    assert (tmp_path / "trained" / "config.json").is_file()


@pytest.fixture
def kiosk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A new user's folder after the page's first command."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main(["new", "task", "kiosk"]) == 0
    yield tmp_path
    sys.modules.pop("kiosk", None)


def test_the_newcomers_steps_lead_to_a_trained_model_and_its_page(
    kiosk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = re.findall(r"^    upshot (.*?)  +#", PAGE.partition("## The nouns")[0], re.MULTILINE)
    assert [step.split()[0] for step in steps] == ["new", "train", "train", "view"]
    assert main([*steps[1].split()]) == 0
    assert main([*steps[2].split(), *SMALL, "run_dir=runs/kiosk-…"]) == 0
    assert main([*steps[3].split(), "--out"]) == 0  # otherwise the page is served until Ctrl-C
    assert (kiosk / "runs" / "kiosk-…" / "report.html").is_file()
    assert "kiosk:brief" in capsys.readouterr().out


def test_the_calls_from_python_run_as_pasted(kiosk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = [text for text in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "upshot.load" in text]
    small = dict(word.split("=", 1) for word in SMALL if "=" in word)
    recipe = upshot.load("kiosk.yaml", **{key: yaml.safe_load(value) for key, value in small.items()})
    kept = block.replace('upshot.load("kiosk.yaml", train={"steps": 5}, seed=1)', "upshot.load(recipe, seed=1)")
    assert kept != block
    exec(compile(kept, "own-task.md", "exec"), {"recipe": recipe})
    assert capsys.readouterr().out.splitlines()[-3].startswith("finished")


def test_every_noun_of_the_page_is_public() -> None:
    nouns = re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)
    assert nouns and set(nouns) <= set(dir(upshot))
