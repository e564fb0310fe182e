"""A run whose policy is sampled by vLLM: rewards, versions, agreement with the learner, and a killed server."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.serving.vllm.fake_vllm import KEY, FakeVllm
from tests.training.workshop import metrics, recipe
from upshot.config.model_spec import ModelSpec
from upshot.config.recipe import Recipe
from upshot.run import checks, policy_server
from upshot.run.console import Reporter
from upshot.run.folder import RunFolder
from upshot.run.run import train
from upshot.serving.vllm import launch
from upshot.serving.vllm import policy as room

TINY = {"tiny": {"hidden": 16, "layers": 1, "heads": 2, "mlp": 32}, "engine": "vllm"}


class Servers(list[FakeVllm]):
    """The servers that runs have started."""


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Servers]:
    """`upshot train` starts the stand-in in place of vLLM."""
    started = Servers()

    @contextmanager
    def lease(file: str, say: Callable[[str], None]) -> Iterator[None]:
        from transformers import AutoModelForCausalLM

        server = yaml.safe_load(Path(file).read_text())["servers"]["policy"]
        started.append(FakeVllm(AutoModelForCausalLM.from_pretrained(server["model"])))
        yield
        started[-1].close()

    def find(recipe: Recipe, run: Path) -> launch.Address:
        spec = ModelSpec(url=started[-1].url, model="policy", token_ids=True, api_key_env=launch.KEY, retries=0)
        return launch.Address(spec, KEY, run / "log", start_s=30.0)

    monkeypatch.setattr(policy_server.secrets, "token_hex", lambda _: KEY)
    monkeypatch.setattr(policy_server, "lease", lease)
    monkeypatch.setattr(launch, "find", find)
    thorough = [check for check in checks._thorough() if check.__module__ != "upshot.run.checks.vllm"]
    monkeypatch.setattr(checks, "_thorough", lambda: thorough)
    monkeypatch.setattr(room, "POLL_S", 0.02)
    yield started


def small(folder: Path, **more: Any) -> Recipe:
    model = {**TINY, **more.pop("model", {})}
    settings = {"steps": 3, "warm": False, "prompts_per_step": 2, "group_size": 3, "lr": 1e-2, **more}
    return recipe(folder, more={"model": model}, **settings)


@pytest.mark.parametrize("lora", [None, {"r": 2, "dropout": 0.0}])
def test_every_step_is_sampled_by_the_newest_weights_and_agrees_with_the_learner(
    servers: Servers, tmp_path: Path, lora: Any
) -> None:
    train(small(tmp_path / "run", model={"lora": lora}))
    lines = [line for line in metrics(tmp_path / "run") if "reward/mean" in line]
    assert len(lines) == 3 and all(math.isfinite(line["reward/mean"]) for line in lines)
    assert all(line["policy/drift_max"] < 1e-4 for line in lines)
    assert all(line["policy/importance"] == pytest.approx(1.0, abs=1e-4) for line in lines)
    raw = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(line["time/sync"] > 0 for line in raw if "reward/mean" in line)
    versions = [int(body["version"]) for body in servers[0].seen]
    assert versions == sorted(versions) and set(versions) == {0, 1, 2}


def test_two_updates_per_step_are_two_versions(servers: Servers, tmp_path: Path) -> None:
    train(small(tmp_path / "run", steps=2, minibatches=2))
    assert {int(body["version"]) for body in servers[0].seen} == {0, 2}


def test_a_server_killed_during_a_run_is_replaced_and_the_run_continues(servers: Servers, tmp_path: Path) -> None:
    class Kills(Reporter):
        """Ends the server at the second step, while replies are being sampled."""

        killed = False

        def show_progress(self, done: int, total: int) -> None:
            if not self.killed and done and int(servers[0].seen[-1]["version"]) == 1:
                self.killed = True
                servers[0].kill()
                threading.Timer(0.3, servers[0].start).start()

        def step(self, phase: str, step: int, metrics: Mapping[str, float]) -> None:
            pass

    reporter = Kills()
    train(small(tmp_path / "run"), reporter=reporter)
    lines = [line for line in metrics(tmp_path / "run") if "reward/mean" in line]
    assert reporter.killed and len(lines) == 3
    assert all(line["policy/drift_max"] < 1e-4 for line in lines)


def test_a_resumed_run_begins_with_the_weights_of_its_checkpoint(servers: Servers, tmp_path: Path) -> None:
    class Stops(Reporter):
        def step(self, phase: str, step: int, metrics: Mapping[str, float]) -> None:
            if step == 2:
                raise RuntimeError("stop")

    with pytest.raises(RuntimeError):
        train(small(tmp_path / "run", save={"every": 1}), reporter=Stops())
    folder = RunFolder.open(tmp_path / "run")
    train(folder.recipe, folder)
    lines = [line for line in metrics(tmp_path / "run") if "reward/mean" in line]
    assert len(lines) == 3 and len(servers) == 2
    assert all(line["policy/drift_max"] < 1e-4 for line in lines)
