"""Trackers: logged values arrive, missing stays missing, a missing package is one clear line."""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.patience import wait_until
from upshot.core.errors import UserError
from upshot.run.trackers import make_trackers, run_id

RECIPE = {"name": "quickstart", "train": {"lr": 3e-4}}


def test_tensorboard_reads_back_what_was_logged(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the tensorboard extra is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (tracker,) = make_trackers(["tensorboard"], tmp_path, RECIPE)
    for step in range(1, 6):
        tracker.log(step, {"reward/mean": step / 10, "loss/total": None if step == 3 else -1.0, "x": float("nan")})
    tracker.finish()

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    tensors = {tag: events.Tensors(tag) for tag in events.Tags()["tensors"]}
    assert set(tensors) == {"reward/mean", "loss/total"}
    rewards = {event.step: pytest.approx(event.tensor_proto.float_val[0]) for event in tensors["reward/mean"]}
    assert rewards == {1: 0.1, 2: 0.2, 3: 0.3, 4: 0.4, 5: 0.5}
    assert [event.step for event in tensors["loss/total"]] == [1, 2, 4, 5]


def test_wandb_offline_writes_into_the_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="the wandb extra is not installed; the stub test covers the calls")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    (tracker,) = make_trackers(["wandb"], tmp_path, RECIPE)
    tracker.log(2, {"reward/mean": 0.25})
    tracker.log(1, {"reward/mean": 0.5})  # a step number that goes back must not be an error
    tracker.finish()
    written = list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    assert len(written) == 1
    assert run_id(tmp_path) in written[0].name
    # wandb's own process may still write after `finish` has returned.
    wait_until(lambda: b"reward/mean" in written[0].read_bytes())


class Recorder:
    """Stands in for a run object of wandb or trackio."""

    def __init__(self) -> None:
        self.logged: list[tuple[dict[str, Any], int | None]] = []
        self.finished = False

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        """Accepted and ignored."""

    def log(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self.logged.append((metrics, step))

    def finish(self) -> None:
        self.finished = True


def stub(monkeypatch: pytest.MonkeyPatch, name: str) -> tuple[Recorder, dict[str, Any]]:
    recorder, asked = Recorder(), {}

    def init(**options: Any) -> Recorder:
        asked.update(options)
        return recorder

    module = types.ModuleType(name)
    module.init = init  # type: ignore[attr-defined]
    module.errors = SimpleNamespace(Error=RuntimeError)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, module)
    return recorder, asked


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_hosted_trackers_get_recipe_name_and_present_values(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder, asked = stub(monkeypatch, name)
    (tracker,) = make_trackers([name, name], tmp_path / "run-7", RECIPE)
    tracker.log(3, {"reward/mean": 0.5, "reward/std": None, "kl": float("inf")})
    tracker.finish()
    assert asked["config"] == RECIPE and asked["name"] == "run-7" and asked["project"] == "upshot"
    metrics, step = recorder.logged[0]
    assert metrics["reward/mean"] == 0.5
    assert not {"reward/std", "kl"} & set(metrics)
    assert 3 in (step, metrics.get("step"))
    assert recorder.finished


def test_an_error_of_wandb_at_the_start_is_a_user_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub(monkeypatch, "wandb")

    def refuse(**options: Any) -> None:
        raise RuntimeError("no API key configured")

    monkeypatch.setattr(sys.modules["wandb"], "init", refuse)
    with pytest.raises(UserError, match=r"no API key.*WANDB_MODE=offline"):
        make_trackers(["wandb"], tmp_path, RECIPE)


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_a_missing_package_names_the_pip_command(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(module: str) -> types.ModuleType:
        raise ModuleNotFoundError(f"No module named '{name}'", name=name)

    monkeypatch.setattr("upshot.run.trackers.importlib.import_module", absent)
    with pytest.raises(UserError, match=rf"pip install -e '\.\[{name}\]'"):
        make_trackers([name], tmp_path, RECIPE)


def test_trackers_made_before_a_failing_one_are_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, _ = stub(monkeypatch, "trackio")
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match="wandb"):
        make_trackers(["trackio", "wandb"], tmp_path, RECIPE)
    assert recorder.finished


def test_an_unknown_tracker_is_refused_with_a_suggestion(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"unknown tracker 'tensorbord'.*did you mean 'tensorboard'"):
        make_trackers(["tensorbord"], tmp_path, RECIPE)


def test_the_module_imports_neither_torch_nor_any_tracker() -> None:
    heavy = ("torch", "wandb", "tensorboard", "trackio")
    code = f"import sys, upshot.run.trackers; print([name for name in {heavy} if name in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_a_failing_tracker_is_reported_once_and_ends_no_run(tmp_path: Path) -> None:

    from upshot.config.recipe import CreditConfig
    from upshot.run.writer import Writer

    class Full:
        def log(self, step: int, metrics: Any) -> None:
            raise OSError(28, "No space left on device")

        def finish(self) -> None:
            raise OSError(28, "No space left on device")

    said: list[str] = []
    reporter: Any = SimpleNamespace(say=said.append, step=lambda *_: None, phase=lambda *_: None)
    folder: Any = SimpleNamespace(write_status=lambda *_, **__: None, write_index=lambda: None, lines=lambda _: [])
    recipe: Any = SimpleNamespace(keep_rollouts=0, credit=CreditConfig())
    seen: list[int] = []
    works: Any = SimpleNamespace(log=lambda step, _: seen.append(step), finish=lambda: None)
    writer = Writer(recipe, folder, reporter, None, lambda ids: [], [Full(), works])  # type: ignore[arg-type]
    writer.begin("rl", 2, 0)
    writer.announce(1, {"loss": 1.0})
    writer.announce(2, {"loss": 1.0})
    writer.close()
    assert seen == [1, 2]
    assert len(said) == 1 and "tracker Full failed" in said[0] and "No space left" in said[0]


def test_numpy_numbers_arrive_and_non_finite_ones_do_not() -> None:
    from upshot.config.recipe import CreditConfig
    from upshot.run.writer import Writer

    reporter: Any = SimpleNamespace(say=lambda _: None, step=lambda *_: None, phase=lambda *_: None)
    folder: Any = SimpleNamespace(write_status=lambda *_, **__: None, write_index=lambda: None, lines=lambda _: [])
    recipe: Any = SimpleNamespace(keep_rollouts=0, credit=CreditConfig())
    seen: list[Any] = []
    tracker: Any = SimpleNamespace(log=lambda _, metrics: seen.append(metrics), finish=lambda: None)
    writer = Writer(recipe, folder, reporter, None, lambda ids: [], [tracker])  # type: ignore[arg-type]
    writer.begin("rl", 1, 0)
    torchs = {"t": torch.tensor(0.25), "true": np.bool_(True), "huge": 10**400}
    writer.announce(1, {"x": np.float32(0.5), "n": np.int64(3), "nan": float("nan"), "word": "a", **torchs})
    assert seen == [{"rl/x": 0.5, "rl/n": 3, "rl/t": 0.25, "rl/true": True}]
