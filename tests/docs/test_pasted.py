"""What the tutorials and how-to pages print runs as pasted, with smaller settings: files, recipes, commands, Python."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import DOCS
from upshot.cli import main

OWN, TRL = DOCS / "tutorials/own-data.md", DOCS / "tutorials/from-trl.md"
SFT, DPO, GRPO = (DOCS / f"howto/{name}.md" for name in ("sft", "dpo", "grpo"))
FILES = {OWN: ("questions", "goals"), SFT: ("talks",), DPO: ("pairs",), GRPO: ("qa",)}
"""Names for what the lines of a page's blocks contain."""
FEW = ("train.steps=1", "train.prompts_per_step=2", "model.path=model", "run_dir=run", "--quiet")
GROUP = ("train.group_size=2", "episode.max_tokens=4", "eval.every=0")
SMALL = {
    "model.tiny": {"hidden": 16, "layers": 1, "heads": 2, "mlp": 32},
    "task.rows_per_split": 16,
    "warm_start": {"steps": 1, "batch": 4},
    "train.prompts_per_step": 2,
    "train.group_size": 2,
    "train.steps": 1,
    "eval.rows": 2,
}


def blocks(page: Path, language: str) -> list[str]:
    """The code blocks of a page."""
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def block(page: Path, holds: str, language: str = "python") -> str:
    """The one block that contains a text."""
    (found,) = [text for text in blocks(page, language) if holds in text]
    return found


def paste(code: str, **space: Any) -> dict[str, Any]:
    """Run code as if it were pasted."""
    exec(compile(code, "pasted", "exec"), space)
    return space


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A reader's folder with the files, recipes and metrics of the pages, and the model that one of them trains."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for page, names in FILES.items():
        for name, lines in zip(names, blocks(page, "json"), strict=True):
            (tmp_path / f"{name}.jsonl").write_text(lines)
    for page in (*FILES, TRL):
        for text in blocks(page, "yaml"):
            if named := re.match(r"# (\w+\.yaml)\n", text):
                (tmp_path / named[1]).write_text(text)
    polite = block(TRL, "# Upshot: rewards.py").partition("# Upshot")[2].partition("\n")[2]
    (tmp_path / "rewards.py").write_text(block(OWN, "mentions_reference") + polite)
    small = "shape={'hidden': 16, 'layers': 1, 'heads': 2, 'mlp': 32}, max_tokens=8"
    paste(block(OWN, "Trainer.tiny").replace("max_tokens=8", small))
    yield tmp_path
    sys.modules.pop("rewards", None)


def test_recipes_for_the_users_own_files_train(desk: Path) -> None:
    assert main(["train", "questions.yaml", "--dry-run", "--quiet"]) == 0
    for recipe in ("questions", "goals", "polite"):
        assert main(["train", f"{recipe}.yaml", *FEW, *GROUP, f"run_dir={recipe}"]) == 0
        assert (desk / recipe / "metrics.jsonl").is_file()
    few = {"train": {"steps": 1, "prompts_per_step": 2, "group_size": 2}, "model.path": "model", "eval.every": 0}
    call = block(TRL, 'upshot.train("polite.yaml"').replace('train={"steps": 100}', "**few")
    assert paste(call, polite=lambda conversation: 1.0, few=few)["run"].status["state"] == "finished"


def test_the_plain_recipes_train_on_a_jsonl(desk: Path) -> None:
    import upshot

    assert main(["train", "sft", "train.data=talks.jsonl", *FEW]) == 0
    assert main(["train", "dpo", "train.data=pairs.jsonl", *FEW, "model.path=run", "run_dir=dpo"]) == 0
    assert "dpo/margin" in upshot.runs.read("dpo").steps[-1]
    (desk / "qa.jsonl").write_text((desk / "qa.jsonl").read_text() * 8)
    assert main(["train", "grpo", "task.file=qa.jsonl", *FEW, *GROUP, "run_dir=grpo"]) == 0
    assert upshot.runs.read("grpo").steps[-1]["reward/missing"] == 0
    (desk / "mine.yaml").write_text((desk / "mine.yaml").read_text() + "model: {path: model}\n")
    assert paste(block(SFT, "upshot.train("))["run"].status["state"] == "finished"


def test_the_python_of_tour_run_folder_and_sweep_runs(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import upshot

    (sweep,) = re.findall(r"^    upshot (sweep .*)$", (DOCS / "howto/compare-and-sweep.md").read_text(), re.MULTILINE)
    short = sweep.replace("[2,4]", "[2]").replace("--seeds 3", "--quiet").replace("eval.every=20", "eval.every=1")
    assert short.count("[2]") == short.count("--quiet") == short.count("eval.every=1") == 1
    small = [f"{key}={json.dumps(value)}" for key, value in SMALL.items()]
    assert main([*shlex.split(short.replace(" train.steps=40", "")), *small]) == 0
    assert {run.recipe.credit.by for run in upshot.runs.find("runs")} == {"reply", "tree"}
    (run, *_) = upshot.runs.find("runs")
    paste(block(DOCS / "howto/run-folder.md", "runs.read").replace("runs/quickstart-…", str(run.path)))
    paste(block(DOCS / "howto/compare-and-sweep.md", "run.path.name"))
    tour = block(DOCS / "tour.md", "upshot.train(")
    whole = 'train={"steps": 2}, warm_start={"steps": 20}'
    assert whole in tour
    paste(tour.replace(whole, "**small"), small=SMALL)
    assert "→" in capsys.readouterr().out
