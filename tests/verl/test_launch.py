"""What is prepared before verl starts, and how its program is run."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from upshot.config.load import load_recipe
from upshot.config.recipe import Recipe, TinyConfig
from upshot.core.errors import UserError
from upshot.models.tiny import tiny_model, tiny_tokenizer
from upshot.run.console import Reporter
from upshot.run.folder import RunFolder
from upshot.tasks.slots import SlotsTask
from upshot.verl import launch as launching
from upshot.verl.config import compose
from upshot.verl.launch import command, environment, launch
from upshot.verl.plan import RECIPE
from upshot.verl.prepare import prepare
from upshot.verl.process import run


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    task = SlotsTask(rows_per_split=64)
    tokenizer = tiny_tokenizer(task.vocabulary())
    tiny_model(TinyConfig(hidden=16, layers=1, heads=2, mlp=32), tokenizer, 0).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    own = [
        "task.rows_per_split=64",
        "warm_start=null",
        f"model.path={tmp_path / 'model'}",
        f"run_dir={tmp_path / 'run'}",
    ]
    return load_recipe("quickstart", ["credit.by=reply", *own, "eval.rows=8"]).recipe


def test_rows_are_written_and_measured_before_the_start(recipe: Recipe, tmp_path: Path) -> None:
    place = prepare(recipe, tmp_path / "run")
    assert (place.rows, place.context) == (64, 256)
    assert place.prompt_tokens is not None and 10 < place.prompt_tokens < 40
    assert len(json.loads((tmp_path / "run/data/validation.json").read_text())) == 8
    plan = compose(recipe, place)
    plan.check()
    words = command(plan)
    assert f"data.max_prompt_length={place.prompt_tokens}" in words
    assert not any("measured" in word for word in words)
    assert environment(recipe, tmp_path / "run")[RECIPE].endswith("run/workers.yaml")


def test_a_run_streams_its_output_and_a_failed_one_says_how_it_ended(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(launching.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(launching, "find", lambda recipe, plan, **more: [])
    code = "print('step:1'); raise SystemExit('out of paper')"
    monkeypatch.setattr(launching, "command", lambda plan: [sys.executable, "-c", code])
    with pytest.raises(UserError, match="out of paper"):
        launch(recipe, [], said.append)
    assert "step:1" in said
    assert "step:1" in (tmp_path / "run/verl.log").read_text()
    assert "← train.lr" in (tmp_path / "run/verl.txt").read_text()


def test_an_interrupted_run_leaves_no_process_behind(tmp_path: Path) -> None:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    found: list[int] = []

    def stop(line: str) -> None:
        found.append(int(line))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run([sys.executable, "-c", code], dict(os.environ), tmp_path / "log", stop)
    time.sleep(0.01)
    with pytest.raises(ProcessLookupError):
        os.kill(found[0], 0)


def test_without_verl_the_error_says_what_to_install(recipe: Recipe) -> None:
    if launching.importlib.util.find_spec("verl") is not None:
        pytest.skip("verl is here")
    with pytest.raises(UserError, match=r"\.\[verl\]"):
        launch(recipe, [])


def test_resuming_a_finished_run_starts_nothing(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(launching, "find", lambda *_, **__: [])
    monkeypatch.setattr(launching, "newest_step", lambda folder: recipe.train.steps)
    folder = RunFolder.create(recipe)
    monkeypatch.setattr(launching, "command", lambda plan: ["no such program"])
    launch(recipe, [], resumed=folder)
    assert json.loads((folder.path / "status.json").read_text())["state"] == "finished"
    assert (folder.path / "report.html").is_file()


def test_a_stopped_run_has_its_reason_its_report_and_how_to_resume(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(launching, "find", lambda *_, **__: [])
    run = tmp_path / "run"
    code = f"""
import json, pathlib
run = pathlib.Path({str(run)!r})
(run / "metrics.jsonl").write_text(json.dumps({{"phase": "rl", "step": 1, "reward/mean": 1.0}}) + "\\n")
(run / "status.json").write_text(json.dumps({{"state": "running", "phase": "rl", "step": 1, "steps": 9}}))
(run / "checkpoints/global_step_1/actor").mkdir(parents=True)
(run / "checkpoints/latest_checkpointed_iteration.txt").write_text("1")
raise SystemExit("out of paper")
"""
    monkeypatch.setattr(launching, "command", lambda plan: [sys.executable, "-c", code])
    said: list[str] = []

    told: list[tuple[int, float]] = []

    class Saying(Reporter):
        def step(self, phase: str, step: int, metrics: Mapping[str, float]) -> None:
            told.append((step, metrics["reward/mean"]))

        def say(self, text: str) -> None:
            said.append(text)

    with pytest.raises(UserError, match="out of paper"):
        launch(recipe, [], lambda line: None, reporter=Saying())
    status = json.loads((run / "status.json").read_text())
    assert status["state"] == "stopped" and "out of paper" in status["reason"]
    assert (status["step"], status["steps"]) == (1, 9), "what the trainer told stays"
    assert told == [(1, 1.0)]
    assert (run / "report.html").is_file()
    assert said[-1] == f"resume with  upshot train --engine verl --resume {run}"
