"""A run that stops at any moment: nothing inconsistent is saved, nothing finished is lost, no second process writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from tests.training.workshop import metrics, recipe
from upshot.core.errors import UserError
from upshot.run import run as runner
from upshot.run.console import Reporter
from upshot.run.folder import RunFolder
from upshot.run.run import TrainingRun, train
from upshot.training.learner.learner import Learner
from upshot.training.loops import rl


class Broken(Exception):
    """The failure in these tests."""


def resume(folder: Path, reporter: Reporter | None = None) -> None:
    train(RunFolder.open(folder).recipe, RunFolder.open(folder), reporter)


def fails_at(call: int, method: Callable[..., Any], late: bool = False) -> Callable[..., Any]:
    """The method, but its nth call fails, before or after it has done its work."""
    count = 0

    def wrapped(*args: Any, **more: Any) -> Any:
        nonlocal count
        count += 1
        if count == call and not late:
            raise Broken
        result = method(*args, **more)
        if count == call:
            raise Broken
        return result

    return wrapped


def updates(folder: Path) -> tuple[str, int]:
    """The newest checkpoint, and the number of optimizer steps it contains."""
    found = RunFolder.open(folder).latest()
    assert found is not None
    return found.path.name, torch.load(found.path / "learner.pt", weights_only=True)["steps"]


@pytest.mark.parametrize(
    ("name", "owner", "call"),
    [("forward_backward", Learner, 4), ("append_metrics", RunFolder, 2), ("append_rollouts", RunFolder, 2)],
    ids=["second minibatch of step 2", "writing the line of step 2", "writing the rollouts of step 2"],
)
def test_an_incomplete_update_or_one_without_its_line_is_not_saved(
    name: str, owner: type, call: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"warm": False, "steps": 3, "save": {"every": 1}, "minibatches": 2}
    train(recipe(tmp_path / "straight", **settings))
    with monkeypatch.context() as broken:
        broken.setattr(owner, name, fails_at(call, getattr(owner, name)))
        with pytest.raises(Broken):
            train(recipe(tmp_path / "run", **settings))
    assert updates(tmp_path / "run") == ("rl-000001", 2), "two minibatches a step; the third update was torn"
    resume(tmp_path / "run")
    assert metrics(tmp_path / "run") == metrics(tmp_path / "straight")


def test_an_error_before_the_update_saves_the_step_before_with_its_random_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lora = {"model": {"tiny": {"hidden": 16, "layers": 1, "heads": 2, "mlp": 32}, "lora": {"r": 2, "dropout": 0.5}}}
    settings: dict[str, Any] = {"warm": False, "method": "sft", "steps": 4, "save": {"every": 0}, "more": lora}
    train(recipe(tmp_path / "straight", **settings))
    with monkeypatch.context() as broken:
        broken.setattr(Learner, "forward_backward", fails_at(3, Learner.forward_backward, late=True))
        with pytest.raises(Broken):
            train(recipe(tmp_path / "run", **settings))
    assert updates(tmp_path / "run") == ("sft-000002", 2)
    resume(tmp_path / "run")
    assert metrics(tmp_path / "run") == metrics(tmp_path / "straight"), "dropout draws again what it drew"


@pytest.mark.parametrize("method", ["sft", "rl"])
def test_a_new_model_in_16_bits_is_the_one_that_its_checkpoint_holds(method: str, tmp_path: Path) -> None:
    narrow = {"model": {"tiny": {"hidden": 16, "layers": 1, "heads": 2, "mlp": 32}, "dtype": "bfloat16"}}
    settings: dict[str, Any] = {"warm": False, "method": method, "save": {"every": 0}, "more": narrow}
    train(recipe(tmp_path / "straight", steps=2, **settings))
    train(recipe(tmp_path / "run", steps=1, **settings))
    longer = RunFolder.open(tmp_path / "run").recipe
    longer = longer.model_copy(update={"train": longer.train.model_copy(update={"steps": 2})})
    train(longer, RunFolder.open(tmp_path / "run"))
    assert metrics(tmp_path / "run") == metrics(tmp_path / "straight")


def test_values_that_json_lacks_do_not_end_a_run(tmp_path: Path) -> None:
    odd = [{"name": f"tests.training.helpers:{name}"} for name in ("Odd", "NoMapping")]
    train(recipe(tmp_path / "run", warm=False, steps=1, more={"reward": {"metrics": odd}}))
    (line,) = metrics(tmp_path / "run")
    assert line["metric/Odd"] == 0.5


class Recorder:
    """A tracker in memory."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, dict[str, Any]]] = []

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.lines.append((step, dict(metrics)))

    def finish(self) -> None:
        pass


def test_a_missed_last_evaluation_is_done_once_after_resuming_and_is_tracked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {
        "warm": False,
        "steps": 2,
        "save": {"every": 0},
        "more": {"eval": {"every": 1, "rows": 2}},
    }
    train(recipe(tmp_path / "straight", **settings))
    with monkeypatch.context() as broken:
        broken.setattr(rl, "play_held_out", fails_at(3, rl.play_held_out))
        with pytest.raises(Broken):
            train(recipe(tmp_path / "run", **settings))
    recorder = Recorder()
    monkeypatch.setattr(runner, "make_trackers", lambda *_: [recorder])
    resume(tmp_path / "run")
    assert metrics(tmp_path / "run") == metrics(tmp_path / "straight")
    assert [step for step, _ in recorder.lines] == [2]
    assert "rl/eval/reward/mean" in recorder.lines[0][1]
    resume(tmp_path / "run")
    assert metrics(tmp_path / "run") == metrics(tmp_path / "straight"), "and not made a second time"


class Rival(Reporter):
    """Resumes the run while it is in progress."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.refused = 0

    def step(self, phase: str, step: int, metrics: Mapping[str, float]) -> None:
        """Try it after every step."""
        folder = RunFolder.open(self.folder)
        turn = TrainingRun(folder.recipe, folder, Reporter()).train()
        try:
            turn.send(None)
        except UserError:
            self.refused += 1


def test_a_live_run_is_not_resumed_by_a_second_one(tmp_path: Path) -> None:
    rival = Rival(tmp_path / "run")
    train(recipe(tmp_path / "run", warm=False, steps=3, save={"every": 0}), reporter=rival)
    assert rival.refused == 3
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2, 3]


def test_what_was_spent_is_remembered_even_if_the_step_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    helped = {
        "models": {"user": "scripted:tests.training.helpers:customer"},
        "futures": {"samples": 1, "rounds": 1, "user": {"name": "llm", "model": "user"}},
    }
    settings: dict[str, Any] = {"warm": False, "steps": 2, "save": {"every": 0}, "more": helped}
    with monkeypatch.context() as broken:
        broken.setattr(TrainingRun, "step_done", fails_at(2, TrainingRun.step_done))
        with pytest.raises(Broken):
            train(recipe(tmp_path / "run", **settings))
    spent = RunFolder.open(tmp_path / "run").spent()
    assert spent["calls"] == 24, "two steps of twelve replies"
    resume(tmp_path / "run")
    assert RunFolder.open(tmp_path / "run").spent()["calls"] > spent["calls"]


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", None])
def test_a_damaged_optimizer_state_is_named_with_what_to_do(content: bytes | None, tmp_path: Path) -> None:
    folder = tmp_path / "rl-000002"
    folder.mkdir()
    if content is None:
        torch.save({"of": "something else"}, folder / "learner.pt")
    else:
        (folder / "learner.pt").write_bytes(content)
    with pytest.raises(UserError, match=r"learner.pt' is damaged .*; delete the folder rl-000002") as refused:
        Learner.load(MagicMock(), folder)
    assert "\n" not in str(refused.value)
