"""docs/agents.md and docs/environments.md: the files they print are the files in examples/, which other tests run."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import yaml

import upshot
from upshot.config.recipe import Recipe

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = ROOT / "examples"
SMALL = {
    "model": {"tiny": {"hidden": 16, "layers": 1, "heads": 2, "mlp": 32}},
    "task.rows_per_split": 16,
    "warm_start": {"steps": 1, "batch": 4},
    "train": {"steps": 1, "prompts_per_step": 2, "group_size": 2},
}


@pytest.mark.parametrize(
    ("page", "name"),
    [("agents", "agent"), ("environments", "environment"), ("environments", "stock"), ("environments", "reverse")],
)
def test_the_whole_file_and_its_recipe_are_the_examples(page: str, name: str) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text()
    assert f"```python\n{(EXAMPLES / f'{name}.py').read_text()}```" in text
    assert f"```yaml\n{(EXAMPLES / f'{name}.yaml').read_text()}```" in text


@pytest.mark.parametrize("page", ["agents", "environments"])
def test_every_yaml_block_on_the_page_is_a_valid_part_of_a_recipe(page: str) -> None:
    pieces = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / f"{page}.md").read_text(), re.DOTALL)
    assert len(pieces) > 2
    for piece in pieces:
        Recipe.model_validate({"task": "slots", **yaml.safe_load(piece)})


def test_the_example_runs_as_a_program_for_every_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    program = f"{sys.executable} -S {EXAMPLES / 'agent.py'}"
    run = upshot.train(
        EXAMPLES / "agent.yaml", run_dir=str(tmp_path / "run"), episode={"agent": program, "max_tokens": 6}, **SMALL
    )
    assert run.status["state"] == "finished" and len(run.replies) == 4
    assert all(reply["reward"] in (0.0, 1.0) for reply in run.replies)
