"""Chained adapters: training starts from an earlier adapter, which is also its reference."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.run.test_interrupted import Broken, fails_at
from tests.tiny import tiny_parts
from tests.training.workshop import TINY, assert_same_steps, metrics, recipe
from upshot.config.recipe import LoraConfig, PolicyConfig
from upshot.core.errors import UserError
from upshot.core.files import write_json
from upshot.models.local import adapter_config
from upshot.run.console import Reporter
from upshot.run.folder import RunFolder
from upshot.run.run import TrainingRun, train
from upshot.training.adapters import add_lora, same_shape
from upshot.training.learner.learner import Learner

SHAPE = {"r": 4, "alpha": 8, "dropout": 0.0}
IDS = torch.tensor([[4, 10, 12, 20, 5]])


class Says(Reporter):
    """Records what a run prints."""

    def __init__(self) -> None:
        self.said = ""

    def say(self, text: str) -> None:
        self.said += text + "\n"


def newest(folder: Path) -> Path:
    found = RunFolder.open(folder).latest()
    assert found is not None
    return found.path


def logprobs(module: Any) -> torch.Tensor:
    with torch.no_grad():
        return module.eval()(input_ids=IDS.to(module.device)).logits.log_softmax(-1).cpu()


def loaded(folder: Path) -> torch.Tensor:
    """The outputs of a checkpoint, loaded as any user would."""
    return logprobs(AutoModelForCausalLM.from_pretrained(folder))


@pytest.fixture(scope="module")
def sft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of an SFT that trained adapters."""
    base = tmp_path_factory.mktemp("sft")
    train(recipe(base / "base", steps=1, warm=False))
    model = {"model": {"path": str(newest(base / "base")), "lora": SHAPE, "dtype": "float32"}}
    train(recipe(base / "sft", method="sft", warm=False, steps=20, lr=3e-2, more=model))
    found = newest(base / "sft")
    assert not torch.allclose(loaded(found), loaded(newest(base / "base")), atol=0.3)
    return found


def settings(sft: Path, lora: Mapping[str, Any] | None) -> dict[str, Any]:
    more = {
        "model": {"path": str(sft), "lora": lora, "dtype": "float32"},
        "reward": {"metrics": [{"name": "tests.training.helpers:Lottery"}]},
    }
    return {"warm": False, "steps": 3, "save": {"every": 1}, "kl": 0.1, "more": more}


@pytest.mark.parametrize(
    ("lora", "words", "trained"),
    [
        (SHAPE, "training continues on it", "lora_"),
        (SHAPE, "its newest checkpoint", "lora_"),
        ({**SHAPE, "r": 2}, "merged into", "lora_"),
        (None, "it is merged, and all weights are trained", "model."),
    ],
    ids=["same shape", "run folder", "other shape", "no adapters"],
)
def test_an_earlier_adapter_is_where_training_starts_and_the_reference(
    lora: Mapping[str, Any] | None, words: str, trained: str, sft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[tuple[torch.Tensor, torch.Tensor]] = []
    begin = TrainingRun.begin

    def look(self: TrainingRun, learner: Learner, config: Any) -> None:
        with learner._as_reference():
            reference = logprobs(self.policy.module)
        begun.append((logprobs(self.policy.module), reference))
        assert all(trained in name for name in learner.trained)
        begin(self, learner, config)

    monkeypatch.setattr(TrainingRun, "begin", look)
    reporter = Says()
    start = sft.parents[1] if words == "its newest checkpoint" else sft
    train(recipe(tmp_path / "rl", **settings(start, lora)), reporter=reporter)
    assert words in reporter.said
    for found in begun[0]:
        assert torch.allclose(found, loaded(sft), atol=1e-5)
    after = loaded(newest(tmp_path / "rl"))
    assert torch.isfinite(after).all() and not torch.equal(after, begun[0][0]), "the checkpoint loads anywhere"
    folder = RunFolder.open(tmp_path / "rl")
    train(folder.recipe.model_copy(update={"train": folder.recipe.train.model_copy(update={"steps": 4})}), folder)
    assert torch.allclose(begun[1][0], after, atol=1e-5), "a resumed run goes on from its checkpoint"
    assert torch.allclose(begun[1][1], loaded(sft), atol=1e-5), "with the reference that it had"


def test_a_chain_of_adapters_killed_and_resumed_equals_uninterrupted(
    sft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(recipe(tmp_path / "straight", **settings(sft, SHAPE)))
    with monkeypatch.context() as broken:
        broken.setattr(RunFolder, "append_metrics", fails_at(3, RunFolder.append_metrics))
        with pytest.raises(Broken):
            train(recipe(tmp_path / "run", **settings(sft, SHAPE)))
    train(RunFolder.open(tmp_path / "run").recipe, RunFolder.open(tmp_path / "run"))
    assert_same_steps(metrics(tmp_path / "run"), metrics(tmp_path / "straight"))
    assert metrics(tmp_path / "run")[-1]["policy/kl_to_reference"] > 0


def test_with_adapters_and_a_warm_start_the_reference_is_the_model_after_the_warm_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: dict[str, torch.Tensor] = {}
    begin = TrainingRun.begin

    def look(self: TrainingRun, learner: Learner, config: Any) -> None:
        if learner.reference:
            found["start"] = logprobs(self.policy.module)
            with learner._as_reference():
                found["reference"] = logprobs(self.policy.module)
            with self.policy.module.disable_adapter():
                found["base"] = logprobs(self.policy.module)
        begin(self, learner, config)

    monkeypatch.setattr(TrainingRun, "begin", look)
    warm = {"steps": 5, "batch": 8, "lr": 0.03, "warmup_steps": 0}
    train(recipe(tmp_path / "run", steps=1, kl=0.1, more={"model": {**TINY, "lora": SHAPE}, "warm_start": warm}))
    assert torch.equal(found["reference"], found["start"])
    assert not torch.allclose(found["reference"], found["base"], atol=0.01)


def test_the_shape_of_an_adapter_is_compared_with_the_recipe() -> None:
    found = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["v_proj", "q_proj"]}
    assert same_shape(LoraConfig(r=4, alpha=8), found)
    assert same_shape(LoraConfig(r=4, alpha=8, targets=["q_proj", "v_proj"]), found)
    assert not same_shape(LoraConfig(r=4, alpha=8, targets=["q_proj"]), found)
    assert not same_shape(LoraConfig(r=8, alpha=8), found)
    assert not same_shape(LoraConfig(r=4, alpha=8), {**found, "rank_pattern": {"q_proj": 2}})
    assert not same_shape(LoraConfig(r=4, alpha=8), {**found, "peft_type": "LOHA"})


@pytest.mark.parametrize("target", ["nosuch", "norm", "proj", "mlp"])
def test_a_target_that_the_model_has_no_layer_for_is_refused_with_those_it_has(target: str) -> None:
    lora = LoraConfig(r=2, targets=["q_proj", target])
    with pytest.raises(UserError, match=f"the model has no layer '{target}'; (did you mean|known: .*q_proj)"):
        add_lora(tiny_parts(0)[0], PolicyConfig(lora=lora))


def test_targets_may_be_layers_of_one_block_and_the_head() -> None:
    lora = LoraConfig(r=2, targets=["self_attn.q_proj", "embed_tokens", "down_proj"])
    assert add_lora(tiny_parts(0)[0], PolicyConfig(lora=lora)).peft_config


def test_a_new_model_is_kept_for_the_adapters_that_are_trained_on_it(tmp_path: Path) -> None:
    train(recipe(tmp_path / "first", steps=1, warm=False, more={"model": {"path": "", "lora": SHAPE}}))
    first = newest(tmp_path / "first")
    base = json.loads((first / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert base == str(tmp_path / "first" / "base") and loaded(first).shape == loaded(Path(base)).shape
    train(recipe(tmp_path / "next", steps=1, warm=False, more={"model": {"path": str(first)}}))
    nameless = tmp_path / "nameless"
    shutil.copytree(first, nameless)
    write_json(nameless / "adapter_config.json", {"peft_type": "LORA", "base_model_name_or_path": None})
    with pytest.raises(UserError, match="does not name its base model; write it into"):
        adapter_config(str(nameless))
