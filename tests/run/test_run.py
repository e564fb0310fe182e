"""A run: one seed gives one metrics file; killed and resumed, it ends the same; stopped, it is saved."""

from __future__ import annotations

import json
import os
import resource
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from tests.support.forked import Forked
from tests.training.workshop import metrics, recipe
from upshot.config.load import dump_recipe
from upshot.config.recipe import Recipe
from upshot.core.conversation import Row
from upshot.core.errors import UserError, user_error_in
from upshot.run.console import Reporter
from upshot.run.folder import RunFolder
from upshot.run.run import TrainingRun, train
from upshot.tasks.slots import SlotsTask

LORA = {"model": {"tiny": {"hidden": 16, "layers": 1, "heads": 2, "mlp": 32}, "lora": {"r": 2}}}
METHODS: dict[str, dict[str, Any]] = {
    "rl": {"kl": 0.1, "minibatches": 2},
    "rl-without-warm-start": {"kl": 0.1, "warm": False},
    "rl-lora": {"kl": 0.1, "more": LORA},
    "sft": {"method": "sft", "warm": False, "schedule": "cosine"},
    "sft-lora": {"method": "sft", "warm": False, "more": LORA},
    "online-dpo": {"method": "online-dpo", "group_size": 3},
    "ppo": {"method": "ppo", "kl": 0.05, "minibatches": 2},
}


class Interrupted(Exception):
    """The exception with which the tests stop a run."""


class Stops(Reporter):
    """Raises after a given step of a phase was written."""

    def __init__(self, phase: str, step: int) -> None:
        self.where = (phase, step)

    def step(self, phase: str, step: int, metrics: Mapping[str, float]) -> None:
        """Stop here."""
        if (phase, step) == self.where:
            raise Interrupted


def resume(folder: Path) -> None:
    train(RunFolder.open(folder).recipe, RunFolder.open(folder))


def test_a_task_that_fails_to_name_a_rows_groups_costs_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def groups(self: SlotsTask, row: Row) -> dict[str, str]:
        raise KeyError(row.id)

    monkeypatch.setattr(SlotsTask, "groups", groups)
    asked = recipe(tmp_path / "run", steps=1)
    evaluated = asked.eval.model_copy(update={"every": 1, "samples": 2, "rows": 2, "temperature": 1.0})
    train(asked.model_copy(update={"eval": evaluated}))
    lines = metrics(tmp_path / "run")
    assert [line["step"] for line in lines if line["phase"] == "rl"] == [1, 1], "the step, and the last evaluation"
    assert all(any(name.startswith(which) for line in lines for name in line) for which in ("task/", "eval/task/"))
    assert "cannot name the groups" in caplog.text


@pytest.mark.parametrize("name", METHODS)
def test_killed_and_resumed_equals_uninterrupted(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = METHODS[name]
    train(recipe(tmp_path / "straight", **settings))
    method = settings.get("method", "rl")
    with monkeypatch.context() as killed:
        killed.setattr(TrainingRun, "checkpoint", _until(TrainingRun.checkpoint, method, 2))
        with pytest.raises((Interrupted, BaseExceptionGroup)):
            train(recipe(tmp_path / "resumed", **settings), reporter=Stops(method, 3))
    assert metrics(tmp_path / "resumed")[-1]["step"] == 3, "step 3 was written, and is not in the checkpoint"
    resume(tmp_path / "resumed")
    assert metrics(tmp_path / "resumed") == metrics(tmp_path / "straight")
    rollouts = [_lines(tmp_path / run / "rollouts.jsonl") for run in ("straight", "resumed")]
    assert rollouts[0] == rollouts[1]
    assert json.loads((tmp_path / "resumed" / "status.json").read_text())["state"] == "finished"


HELPED = {
    "models": {"user": "scripted:tests.training.helpers:customer"},
    "futures": {"samples": 2, "rounds": 1, "user": {"name": "llm", "model": "user"}},
    "reward": {"metrics": [{"name": "verifier"}, {"name": "tests.training.helpers:Flaky", "weight": 0}]},
    "call_seconds": 0.2,
}
"""A scripted helper model, and a metric that sometimes never returns."""


def test_killed_and_resumed_with_helper_models_counters_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"warm": False, "steps": 3, "save": {"every": 1}, "more": HELPED}
    train(recipe(tmp_path / "straight", **settings))
    with monkeypatch.context() as killed:
        killed.setattr(TrainingRun, "checkpoint", _until(TrainingRun.checkpoint, "rl", 1))
        with pytest.raises((Interrupted, BaseExceptionGroup)):
            train(recipe(tmp_path / "resumed", **settings), reporter=Stops("rl", 2))
    resume(tmp_path / "resumed")
    lines = metrics(tmp_path / "straight")
    assert metrics(tmp_path / "resumed") == lines
    calls = [line["model/user/user/calls"] for line in lines]
    assert calls[0] > 0 and calls == [calls[0], 2 * calls[0], 3 * calls[0]]
    assert lines[-1]["user/user_turns"] > 0
    raw = [json.loads(line) for line in (tmp_path / "straight" / "metrics.jsonl").read_text().splitlines()]
    assert all(line["missing/timeout"] > 0 for line in raw)
    assert all(line["reward/missing"] == 0 and line["metric/Flaky"] == 1.0 for line in lines)


def _until(checkpoint: Callable[..., None], method: str, last: int) -> Callable[..., None]:
    """Checkpoints up to a step; later ones are not written, as if killed by kill -9."""

    def save(self: TrainingRun, *args: Any) -> None:
        if self.phase != method or self.step <= last:
            checkpoint(self, *args)

    return save


def _lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def test_killed_before_the_first_checkpoint_a_run_restarts_without_duplicate_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(recipe(tmp_path / "straight", steps=3))
    with monkeypatch.context() as killed:
        killed.setattr(TrainingRun, "checkpoint", lambda *_: None)
        with pytest.raises((Interrupted, BaseExceptionGroup)):
            train(recipe(tmp_path / "resumed", steps=3), reporter=Stops("rl", 2))
    resume(tmp_path / "resumed")
    assert metrics(tmp_path / "resumed") == metrics(tmp_path / "straight")


def test_killed_after_the_warm_start_repeats_no_rollout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(recipe(tmp_path / "straight", steps=3))
    with monkeypatch.context() as killed:
        killed.setattr(TrainingRun, "checkpoint", _until(TrainingRun.checkpoint, "rl", -1))
        with pytest.raises((Interrupted, BaseExceptionGroup)):
            train(recipe(tmp_path / "resumed", steps=3), reporter=Stops("rl", 2))
    resume(tmp_path / "resumed")
    assert metrics(tmp_path / "resumed") == metrics(tmp_path / "straight")
    assert _lines(tmp_path / "resumed" / "rollouts.jsonl") == _lines(tmp_path / "straight" / "rollouts.jsonl")


def test_runs_of_one_seed_are_identical_and_of_different_seeds_are_not(tmp_path: Path) -> None:
    for name, seed in (("one", 3), ("two", 3), ("other", 4)):
        train(recipe(tmp_path / name, steps=2, more={"seed": seed}))
    assert metrics(tmp_path / "one") == metrics(tmp_path / "two") != metrics(tmp_path / "other")
    assert {"warm-start", "rl"} == {line["phase"] for line in metrics(tmp_path / "one")}


def test_a_finished_run_resumed_changes_nothing(tmp_path: Path) -> None:
    train(recipe(tmp_path / "run", steps=2, more={"eval": {"every": 1, "rows": 2}}))
    before = metrics(tmp_path / "run")
    resume(tmp_path / "run")
    assert metrics(tmp_path / "run") == before
    assert before[-1]["eval/reward/mean"] is not None


def test_after_an_error_the_progress_is_saved_and_the_checkpoint_loads_anywhere(tmp_path: Path) -> None:
    with pytest.raises((Interrupted, BaseExceptionGroup)):
        train(recipe(tmp_path / "run", save={"every": 0}), reporter=Stops("rl", 3))
    found = RunFolder.open(tmp_path / "run").latest()
    assert found is not None and found[1:] == ("rl", 3)
    AutoModelForCausalLM.from_pretrained(found[0])
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "stopped"


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    train(recipe(tmp_path / "run", save={"every": 1, "keep": 2}))
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == ["rl-000005", "rl-000006"]


def command(tmp_path: Path, settings: Recipe) -> tuple[list[str], dict[str, str]]:
    (tmp_path / "recipe.yaml").write_text(dump_recipe(settings))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return ["upshot.cli", "train", str(tmp_path / "recipe.yaml"), "--quiet"], environment


def start_and_signal(tmp_path: Path, settings: Recipe, number: int) -> int:
    """Start a run in a separate process and send it a signal in the middle of the rl phase; its exit code."""
    words, environment = command(tmp_path, settings)
    lines = Path(settings.run_dir) / "metrics.jsonl"
    with Forked(*words, env=environment) as process:
        while not (lines.is_file() and lines.read_text().count('"phase": "rl"') >= 3):
            assert process.poll() is None, process.communicate()
            time.sleep(0.02)
        process.send_signal(number)
        return process.wait()


def test_kill_9_and_resume_by_command(tmp_path: Path) -> None:
    train(recipe(tmp_path / "straight", steps=40))
    settings = recipe(tmp_path / "killed", steps=40)
    assert start_and_signal(tmp_path, settings, signal.SIGKILL) == -signal.SIGKILL
    assert len(metrics(tmp_path / "killed")) < 44, "killed in the middle"
    resume(tmp_path / "killed")
    assert metrics(tmp_path / "killed") == metrics(tmp_path / "straight")


def test_ctrl_c_saves_the_run_and_says_so(tmp_path: Path) -> None:
    settings = recipe(tmp_path / "run", steps=400, save={"every": 0})
    assert start_and_signal(tmp_path, settings, signal.SIGINT) == 130
    found = RunFolder.open(tmp_path / "run").latest()
    assert found is not None and found[1] == "rl"
    assert found[2] == metrics(tmp_path / "run")[-1]["step"], "the checkpoint is of the last finished step"


@pytest.mark.parametrize("limit", [9_000, 20_000])
def test_a_full_disk_is_one_clear_error_and_earlier_checkpoints_stay(
    limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(recipe(tmp_path / "straight", steps=5))
    with monkeypatch.context() as full:
        full.setattr(TrainingRun, "checkpoint", _on_a_full_disk(TrainingRun.checkpoint, limit))
        with pytest.raises((UserError, BaseExceptionGroup)) as raised:
            train(recipe(tmp_path / "run", steps=5))
    error = user_error_in(raised.value)
    assert error is not None and "cannot write checkpoint" in str(error) and "--resume" in str(error)
    assert "rl-000002" in {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert not list((tmp_path / "run" / "checkpoints").glob(".partial*")), "no half of a checkpoint stays behind"
    resume(tmp_path / "run")
    assert metrics(tmp_path / "run") == metrics(tmp_path / "straight")


def _on_a_full_disk(checkpoint: Callable[..., None], limit: int) -> Callable[..., None]:
    """Checkpoints while no file may grow beyond `limit` bytes, from rl step 4 on: weights or optimizer state do not
    fit."""

    def save(self: TrainingRun, *args: Any) -> None:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        if self.phase == "rl" and self.step >= 4:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        try:
            checkpoint(self, *args)
            self.saver.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return save


def test_an_unwritable_run_folder_is_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match=r"cannot write run folder .*set run_dir"):
        train(recipe(tmp_path / "file" / "run"))


def test_a_folder_that_holds_a_run_is_not_overwritten(tmp_path: Path) -> None:
    train(recipe(tmp_path / "run", steps=0, warm=False))
    with pytest.raises(UserError, match="--resume"):
        train(recipe(tmp_path / "run", steps=0, warm=False))
