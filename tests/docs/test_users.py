"""docs/users.md: its file and recipe run as pasted, and the recipe on the page is the shipped one."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from upshot.cli import main

PAGE = (Path(__file__).parent.parent.parent / "docs" / "users.md").read_text()


def block(language: str, name: str) -> str:
    (found,) = re.findall(rf"```{language}\n# {re.escape(name)}\n(.*?)```", PAGE, re.DOTALL)
    return str(found)


@pytest.fixture
def porter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "porter.py").write_text(block("python", "porter.py"))
    (tmp_path / "porter.yaml").write_text(block("yaml", "porter.yaml"))
    return tmp_path


def test_the_whole_file_trains_as_pasted_and_both_sides_are_in_the_transcripts(porter: Path) -> None:
    small = ("model.tiny={hidden: 32, layers: 1, heads: 2, mlp: 64}", "warm_start={steps: 12, batch: 16}")
    small += ("train.steps=1", "run_dir=run", "--quiet")
    try:
        assert main(["train", "porter.yaml", *small]) == 0
    finally:
        sys.modules.pop("porter", None)
    lines = [json.loads(line) for line in (porter / "run" / "rollouts.jsonl").read_text().splitlines()]
    acts = [act for line in lines for act in line.get("environment", {}).get("acts", ())]
    assert {"policy"} <= {act["by"] for act in acts} <= {"policy", "user"}
    for line in lines:
        right = any(act["name"] == "open_gate" and act["good"] for act in line.get("environment", {}).get("acts", ()))
        assert line["reward"]["means"]["verifier"]["value"] == right
