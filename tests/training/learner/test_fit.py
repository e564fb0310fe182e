"""Engine, learner and helper models get what the memory plan says; parking or merging in place does not change a
run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import tiny_parts
from tests.training.workshop import TINY, assert_same_steps, metrics, recipe
from upshot.config.model_spec import ModelSpec
from upshot.config.recipe import Recipe, TrainConfig
from upshot.core.errors import UserError
from upshot.engine.engine import Engine, EngineSettings
from upshot.models.local import load_local
from upshot.run.run import TrainingRun, train
from upshot.training.bundle import configure_helpers, configure_learner, engine_settings
from upshot.training.learner.forward.select import checkpointing_of
from upshot.training.learner.memory import fit
from upshot.training.learner.memory.plan import MemoryPlan, MemorySetting
from upshot.training.snapshots import FrozenPolicy, PolicyModel

LOTTERY = {"metrics": [{"name": "tests.training.helpers:Lottery"}]}


def settings(folder: Path, **model: Any) -> Recipe:
    more = {"model": {**TINY, **model}, "reward": LOTTERY}
    return recipe(folder, steps=3, warm=False, lr=1e-2, kl=0.1, more=more)


def with_setting(monkeypatch: pytest.MonkeyPatch, **chosen: Any) -> list[Engine]:
    """Force this setting in all plans; returns the engines that were parked."""
    parked: list[Engine] = []
    plan_of, park = fit.plan_of, Engine.park

    def other(*args: Any, **more: Any) -> MemoryPlan:
        plan = plan_of(*args, **more)
        return replace(plan, setting=replace(plan.setting, **chosen))

    def count(self: Engine) -> None:
        parked.append(self)
        park(self)

    monkeypatch.setattr(fit, "plan_of", other)
    monkeypatch.setattr(Engine, "park", count)
    return parked


@pytest.mark.parametrize(
    ("model", "chosen"),
    [({}, {"park": True}), ({"lora": {"r": 4}}, {"park": True, "merge": "in place"})],
    ids=["parked", "merged in place"],
)
def test_parking_the_engine_does_not_change_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: dict[str, Any], chosen: dict[str, Any]
) -> None:
    train(settings(tmp_path / "plain", **model))
    with monkeypatch.context() as patched:
        parked = with_setting(patched, **chosen)
        train(settings(tmp_path / "parked", **model))
        assert len(parked) >= 3 and not any(engine.settings.merge == "never" for engine in parked)
    assert_same_steps(metrics(tmp_path / "parked"), metrics(tmp_path / "plain"))


def test_engine_and_learner_get_what_the_plan_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    begin = TrainingRun.begin

    def look(self: TrainingRun, learner: Any, config: Any) -> None:
        seen.update(
            plan=self.policy.memory, kv=self.policy.engine.settings.kv_bytes, tokens=learner.config.token_budget
        )
        begin(self, learner, config)

    monkeypatch.setattr(TrainingRun, "begin", look)
    train(settings(tmp_path / "run", memory_gb=1.5))
    assert seen["kv"] == seen["plan"].kv_bytes > 0
    assert seen["tokens"] == seen["plan"].setting.tokens == 32768
    assert seen["plan"].peak <= seen["plan"].limit


def test_a_run_that_does_not_fit_is_refused_before_it_samples(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not fit into"):
        train(settings(tmp_path / "run", memory_gb=1.0001))


class Module:
    """Records whether its blocks are recomputed."""

    is_gradient_checkpointing = False

    def gradient_checkpointing_enable(self) -> None:
        self.is_gradient_checkpointing = True

    def gradient_checkpointing_disable(self) -> None:
        self.is_gradient_checkpointing = False


def test_blocks_are_recomputed_if_the_plan_says_so_and_not_in_the_next_phase() -> None:
    module = Module()
    plan = MemoryPlan(MemorySetting(512, "block"), 0, {}, (), 0)
    assert configure_learner(TrainConfig(), plan, module).token_budget == 512
    assert module.is_gradient_checkpointing
    configure_learner(TrainConfig(), replace(plan, setting=MemorySetting(512)), module)
    assert not module.is_gradient_checkpointing
    configure_learner(TrainConfig(), replace(plan, setting=MemorySetting(512, "mlp")), module)
    assert checkpointing_of(module) == ("mlp", None) and not module.is_gradient_checkpointing


def test_helpers_on_the_device_get_their_share_of_keys_and_values(tmp_path: Path) -> None:
    own = settings(tmp_path / "run").model_copy(
        update={"models": {"judge": ModelSpec(model="local:x"), "old": ModelSpec(model="policy@start")}}
    )
    plan = MemoryPlan(MemorySetting(512, merge="never"), 1 << 20, {"judge": 1 << 30, "policy@start": 3 << 20}, (), 1)
    assert configure_helpers(own, plan).models["judge"].kv_gb == 1
    assert engine_settings(own, plan).kv_bytes == 1 << 20 and engine_settings(own, plan).merge == "never"


def test_a_copy_of_the_policy_has_room_for_as_many_keys_and_values() -> None:
    module, tokenizer, renderer, _ = tiny_parts()
    engine = Engine(module, renderer.end_ids, settings=EngineSettings(kv_bytes=3 << 20))
    copy = PolicyModel(engine, tokenizer, renderer, module).copy_at("start")
    assert isinstance(copy, FrozenPolicy) and copy.engine.settings.kv_bytes == 3 << 20


def test_four_bits_without_bitsandbytes_are_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install bitsandbytes"):
        load_local("smollm2-135m", four_bits=True)


def test_four_bits_without_adapters_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be trained"):
        settings(tmp_path / "run", quantize="4bit")
