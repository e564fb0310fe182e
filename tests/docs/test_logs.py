"""The tutorial on logs runs as pasted, from its first command to its last, with smaller settings."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, ROOT
from upshot.cli import main

PAGE = (DOCS / "tutorials/logs.md").read_text()
TINY = ("model.tiny={hidden: 16, layers: 1, heads: 2, mlp: 32}", "--quiet")
STEP = ("train.steps=1", "train.prompts_per_step=2", "train.group_size=2", "reward.max_missing=1", "eval.every=0")
FEWER = {
    "upshot train shop": ("task.rows_per_split=16", "warm_start.steps=1", "warm_start.batch=4", *TINY),
    "python examples/shop_logs.py": ("--conversations", "60"),
    "upshot logs look": ("--quiet",),
    "upshot logs prepare": ("--steps", "2", "--replies", "4", "--samples", "1", "--rounds", "1", "--quiet"),
    "upshot train data/shop/recipe.yaml": (*STEP, "--quiet"),
    "upshot train kto": ("train.steps=1", "train.prompts_per_step=2", "--quiet"),
    "upshot eval": ("--goals", "2", "--quiet"),
}
"""The options that make each command fast."""


def test_every_command_of_the_tutorial_runs_in_its_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    for command in re.findall(r"^    ((?:upshot|python) .*)$", PAGE, re.MULTILINE):
        more = next(own for start, own in FEWER.items() if command.startswith(start))
        words = [*shlex.split(command), *more]
        if words[0] == "python":
            with monkeypatch.context() as program:
                program.setattr(sys, "argv", words[1:])
                runpy.run_path(words[1], run_name="__main__")
        else:
            assert main(words[1:]) in ((0, 1) if words[1] == "eval" else (0,)), command
    assert {"text", "verdict"} <= json.loads(Path("data/shop/validity.json").read_text()).keys()
    for name in re.findall(r"^\| `([a-z_]+\.(?:parquet|jsonl|json|yaml))`", PAGE, re.MULTILINE):
        assert (tmp_path / "data/shop" / name).is_file(), name
