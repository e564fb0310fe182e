"""The same inputs through TRL's own trainers and our learner give the same loss and the same gradient."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from tests.tiny import tiny_parts
from tests.training.workshop import datum
from upshot.config.recipe import TrainConfig
from upshot.training.learner.batch import Datum
from upshot.training.learner.learner import Learner
from upshot.training.loops import kto
from upshot.training.loops.dpo import Dpo
from upshot.training.objectives.objectives import PolicyGradient

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

LENGTHS = (6, 9, 5, 8)
NORMS = {"grpo": "sequence", "bnpo": "token", "dr_grpo": "constant"}
"""TRL's loss_type by the name of our length normalisation."""


def quiet(folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "per_device_train_batch_size": 4,
        "gradient_checkpointing": False,
        **more,
    }


def grpo_trainer(module: Any, tokenizer: Any, folder: Path, loss_type: str, **more: Any) -> Any:
    options = {"epsilon": 0.2, "epsilon_high": 0.3, "use_bias_correction_kl": False, **more}
    config = trl.GRPOConfig(
        **quiet(folder), num_generations=4, loss_type=loss_type, max_completion_length=8, **options
    )  # fmt: skip
    rows = datasets.Dataset.from_list([{"prompt": [{"role": "user", "content": "hello"}]}] * 4)
    return trl.GRPOTrainer(
        module, reward_funcs=lambda completions, **_: [0.0] * len(completions), args=config, train_dataset=rows,
        processing_class=tokenizer,
    )  # fmt: skip


def padded(data: list[Datum], name: str, fill: float = 0) -> torch.Tensor:
    """A column of the data as TRL takes it: padded on the right."""
    return pad_sequence([torch.tensor(getattr(own, name)) for own in data], batch_first=True, padding_value=fill)


def attended(data: list[Datum]) -> torch.Tensor:
    return pad_sequence([torch.ones(len(own.ids), dtype=torch.long) for own in data], batch_first=True)


def reply_part(data: list[Datum], pad: int) -> dict[str, torch.Tensor]:
    """Our data as TRL takes it: prompts and completions apart, sampled log-probabilities beside the completions."""
    prompt = sum(1 - bit for bit in data[0].mask)
    ids, mask = padded(data, "ids", pad), padded(data, "mask")
    return {
        "prompt_ids": ids[:, :prompt],
        "prompt_mask": attended(data)[:, :prompt],
        "completion_ids": ids[:, prompt:],
        "completion_mask": mask[:, prompt:],
        "old_per_token_logps": padded(data, "old")[:, prompt:],
        "ref_per_token_logps": padded(data, "reference")[:, prompt:],
        "advantages": padded(data, "advantages")[:, prompt],
        "num_items_in_batch": mask.sum(),
    }


def gradients(module: Any) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def compare_with_trl(folder: Path, loss_type: str, theirs_more: dict[str, Any], beta: float, **ours: Any) -> None:
    """The same rollouts through both: loss and every gradient."""
    module, tokenizer, _, _ = tiny_parts()
    theirs = copy.deepcopy(module)
    data = [datum(length, seed, prompt=2) for seed, length in enumerate(LENGTHS)]
    for own in data:  # one advantage per reply, as in GRPO; every ratio differs from 1, some are clipped
        own.advantages = [own.advantages[0]] * len(own.ids)
    trainer = grpo_trainer(theirs, tokenizer, folder, loss_type, **theirs_more)
    trainer.beta = beta  # set late: the trainer would look for a reference model; its log-probabilities are given
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    inputs = reply_part(data, tokenizer.pad_token_id)
    if "importance" in ours:  # in TRL it comes from vLLM
        trainer.use_vllm = trainer.vllm_importance_sampling_correction = True
        for own in data:
            own.weights = [0.5 + 0.1 * i for i in range(len(own.ids))]
        inputs["importance_sampling_ratio"] = padded(data, "weights")[:, 2:]
    expected = trainer._compute_loss(trainer.model, inputs)
    expected.backward()
    kl = {"weight": beta, "estimator": "k3", **ours.pop("kl", {})}
    config = TrainConfig.model_validate({"clip": {"low": 0.2, "high": 0.3}, **ours, "kl": kl})
    learner = Learner(module, tokenizer, config, max_tokens=8)
    logs = learner.forward_backward([[own] for own in data], PolicyGradient(config))
    assert logs["loss/policy"] == pytest.approx(expected.item(), rel=1e-6, abs=1e-6)
    assert 0 < logs["policy/clipped"] < 1, "the case is worth comparing"
    wanted = gradients(theirs)
    for name, found in gradients(module).items():
        assert torch.allclose(found, wanted[name], atol=1e-6), name


@pytest.mark.parametrize("beta", [0.0, 0.05])
@pytest.mark.parametrize("loss_type", NORMS)
def test_grpo_equals_trl(loss_type: str, beta: float, tmp_path: Path) -> None:
    compare_with_trl(tmp_path, loss_type, {}, beta, length_norm=NORMS[loss_type])


NARROW, OURS = {"epsilon": 0.001, "epsilon_high": 0.002}, {"clip": {"low": 0.001, "high": 0.002}}
"""Bounds that clip some of these ratios."""
KIN: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gspo": (
        "grpo",
        {"importance_sampling_level": "sequence", **NARROW},
        {"loss": "gspo", "length_norm": "sequence", **OURS},
    ),
    "cispo": (
        "cispo",
        {"epsilon_high": 1.002, "steps_per_generation": 1},
        {"loss": "cispo", "length_norm": "token", **OURS},
    ),
    "dapo": ("dapo", {"steps_per_generation": 1}, {"length_norm": "token"}),
    "k3 corrected": (
        "grpo",
        {"use_bias_correction_kl": True},
        {"kl": {"estimator": "k3-corrected"}, "length_norm": "sequence"},
    ),
    "entropy": ("bnpo", {"entropy_coef": 0.1}, {"entropy": 0.1, "length_norm": "token"}),
    "importance": ("grpo", {}, {"importance": "truncate", "length_norm": "sequence"}),
}
"""Their loss type and options, our settings."""


@pytest.mark.parametrize("name", KIN)
def test_variants_of_grpo_equal_trls(name: str, tmp_path: Path) -> None:
    loss_type, theirs, ours = KIN[name]
    compare_with_trl(tmp_path, loss_type, theirs, 0.05 if "kl" in ours else 0.0, **ours)


@pytest.mark.parametrize("kind", ["sigmoid", "ipo"])
def test_dpo_equals_trl(kind: str, tmp_path: Path) -> None:
    module, tokenizer, _, _ = tiny_parts()
    theirs, initial = copy.deepcopy(module), tiny_parts(seed=5)[0]
    talk = {"prompt": "hello", "chosen": "here is", "rejected": "which ?"}
    trainer = trl.DPOTrainer(
        theirs,
        ref_model=copy.deepcopy(initial),
        args=trl.DPOConfig(**quiet(tmp_path), beta=0.3, loss_type=kind),
        train_dataset=datasets.Dataset.from_list([talk] * 4),
        processing_class=tokenizer,
    )
    data = [datum(length, seed, prompt=2) for seed, length in enumerate(LENGTHS)]
    pairs = [(data[0], data[1]), (data[2], data[3])]
    ordered = [data[0], data[2], data[1], data[3]]  # all chosen, then all rejected
    inputs = {
        "input_ids": padded(ordered, "ids", tokenizer.pad_token_id),
        "attention_mask": attended(ordered),
        "completion_mask": padded(ordered, "mask"),
    }
    trainer.model.train()
    expected = trainer._compute_loss(trainer.model, inputs, return_outputs=False)
    expected.backward()
    config = TrainConfig.model_validate({"dpo": {"beta": 0.3, "loss": kind}})
    learner = Learner(module, tokenizer, config)
    learner.keep_reference(dict(initial.named_parameters()))
    for own, reference in zip(data, learner.logprobs(data, reference=True), strict=True):
        own.reference = reference
    logs = learner.forward_backward(pairs, Dpo(config))
    assert logs["loss/dpo"] == pytest.approx(expected.item(), rel=1e-6, abs=1e-6)
    wanted = gradients(theirs)
    for name, found in gradients(module).items():
        assert torch.allclose(found, wanted[name], atol=1e-6), name


@pytest.mark.parametrize("labels", [(True, False, False, True), (True, True, True, True)])
def test_kto_equals_trl(labels: tuple[bool, ...], tmp_path: Path) -> None:
    module, tokenizer, _, _ = tiny_parts()
    theirs, initial = copy.deepcopy(module), tiny_parts(seed=5)[0]
    weights = {"beta": 0.3, "desirable_weight": 1.5, "undesirable_weight": 0.7}
    trainer = trl.KTOTrainer(
        theirs,
        ref_model=copy.deepcopy(initial),
        args=trl.KTOConfig(**quiet(tmp_path), **weights),
        train_dataset=datasets.Dataset.from_list([{"prompt": "hello", "completion": "here is", "label": True}] * 4),
        processing_class=tokenizer,
    )
    data = [datum(length, seed, prompt=2 + seed % 2) for seed, length in enumerate(LENGTHS)]
    parts = [(own.ids[: own.mask.index(1)], own.ids[own.mask.index(1) :]) for own in data]
    rows = [
        {"prompt_ids": prompt, "completion_ids": reply, "KL_completion_ids": parts[at - 1][1], "label": labels[at]}
        for at, (prompt, reply) in enumerate(parts)
    ]
    trainer.model.train()
    expected = trainer._compute_loss(trainer.model, trainer.data_collator(rows), return_outputs=False)
    expected.backward()
    config = TrainConfig.model_validate({"method": "kto", "kto": weights})
    learner = Learner(module, tokenizer, config)
    learner.keep_reference(dict(initial.named_parameters()))
    for own, label in zip(data, labels, strict=True):
        own.advantages = [1.0 if label else -1.0] * len(own.ids)
    lesson = kto.prepare(learner, data)
    logs = learner.forward_backward(lesson.units, lesson.objective())
    assert logs["loss/kto"] == pytest.approx(expected.item(), rel=1e-6, abs=1e-6)
    assert lesson.logs["kto/kl"] == pytest.approx(trainer._metrics["train"]["kl"][0], rel=1e-5, abs=1e-6)
    wanted = gradients(theirs)
    for name, found in gradients(module).items():
        assert torch.allclose(found, wanted[name], atol=1e-6), name
