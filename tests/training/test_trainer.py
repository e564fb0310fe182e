"""The loop in pieces learns like a run: method, KL, importance, minibatches; what it does not support is refused."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import upshot
from tests.tiny import SHAPE
from upshot.config.recipe import Recipe
from upshot.core.errors import UserError
from upshot.core.score import Score
from upshot.rewards.credit import Reward, credit_sampled
from upshot.rollout.reply import Rollout
from upshot.training.loops import online_dpo, ppo, rl
from upshot.training.trainer import OF_RUNS, Trainer

WORDS = ["which", "size", "please", "here", "is", "a", "lamp", "?"]
ROW = upshot.Row("r", (upshot.Message("user", "a lamp please"),))


def made(**train: Any) -> Trainer:
    shape = {"hidden": SHAPE.hidden, "layers": 1, "heads": 2, "mlp": 32}
    return Trainer.tiny(WORDS, shape=shape, max_tokens=5, **{"lr": 1e-2, **train})


def groups(trainer: Trainer) -> list[list[Rollout]]:
    """Two groups of replies whose reward is their number."""
    found = asyncio.run(trainer.sample([ROW, ROW], 4, seed=1))
    for number, reply in enumerate(reply for group in found for reply in group):
        total = Score(float(number % 3))
        reply.reward, reply.credit = Reward(total), credit_sampled(total, reply.conversation.mask)
    return found


def weights(trainer: Trainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.learner.parameters])


@pytest.mark.parametrize(
    "train",
    [
        {},
        {"kl": 100.0},
        {"kl": {"weight": 2.0, "where": "reward"}},
        {"importance": "mask", "kl": 0.1},
        {"method": "ppo", "kl": 0.1},
        {"method": "online-dpo"},
    ],
    ids=str,
)
def test_in_pieces_and_as_a_round_the_weights_are_those_of_a_run(train: dict[str, Any]) -> None:
    prepare = {"ppo": ppo.prepare, "online-dpo": online_dpo.prepare}.get(train.get("method", "rl"), rl.prepare)
    found = []
    for way in ("pieces", "round", "run"):
        trainer = made(**train)
        for step in range(2):  # in the second step the policy no longer equals the reference
            played = groups(trainer)
            if way == "pieces":
                logs = trainer.forward_backward(played) | trainer.step()
            elif way == "round":
                logs = trainer.learn(played, seed=step)
            else:
                logs = rl.learn(trainer.learner, played, step, prepare)
        found.append((weights(trainer), {k: v for k, v in logs.items() if not k.startswith("policy/drift")}))
    assert torch.equal(found[0][0], found[2][0]) and torch.equal(found[1][0], found[2][0])
    assert found[0][1] == found[1][1] == found[2][1]


def after(trainer: Trainer, steps: int = 2, **learn: Any) -> torch.Tensor:
    for _ in range(steps):
        trainer.learn(groups(trainer), **learn)
    return weights(trainer)


def test_no_setting_is_without_effect() -> None:
    plain = after(made())
    settings: list[dict[str, Any]] = [
        {"kl": 100.0},
        {"kl": {"weight": 1.0, "where": "reward"}},
        {"minibatches": 2},
        {"method": "ppo"},
        {"method": "online-dpo"},
        {"importance": {"rule": "truncate", "high": 0.5, "low": 0.1}},
    ]
    for setting in settings:
        assert not torch.equal(after(made(**setting)), plain), setting


def test_a_round_takes_as_many_steps_as_it_has_minibatches_and_one_gradient_is_refused() -> None:
    trainer = made(minibatches=3)
    played = groups(trainer)
    trainer.learn(played)
    assert trainer.learner.steps == 3
    with pytest.raises(UserError, match=r"train.minibatches is 3.*learn\(groups\)"):
        trainer.forward_backward(played)


@pytest.mark.parametrize("key", OF_RUNS)
def test_settings_that_only_a_run_uses_are_refused(key: str) -> None:
    field = Recipe.model_fields["train"].annotation.model_fields[key]  # type: ignore[union-attr]
    value = field.get_default(call_default_factory=True) or 2
    with pytest.raises(UserError, match=f"Trainer does not take '{key}'"):
        made(**{key: value})


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"loss": "reinforce", "minibatches": 2}, "'reinforce' has no ratio, but all of train.minibatches=2"),
        ({"max_tokens": 0}, "max_tokens = 0: input should be greater"),
        ({"temperature": -1}, "temperature = -1: input should be greater"),
        ({"temperature": float("nan")}, "temperature = nan: input should be"),
        ({"max_context": -5}, "max_context = -5: input should be greater"),
        ({"lrr": 1}, "Trainer: unknown key 'lrr'; did you mean 'lr'?"),
        ({"lr": -1}, "Trainer: lr = -1: input should be greater than 0"),
        ({"lr": True}, "Trainer: lr = True: give a number, not true or false"),
        ({"shape": {"layerz": 1}}, "Trainer: unknown key 'layerz'; did you mean 'layers'?"),
    ],
)
def test_a_setting_that_is_wrong_in_a_recipe_is_wrong_here(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError) as told:
        Trainer.tiny(WORDS, **settings)
    assert says in str(told.value) and "\n" not in str(told.value)


def test_methods_that_learn_from_files_are_refused() -> None:
    with pytest.raises(UserError, match="no method 'dpo'"):
        made(method="dpo")
    with pytest.raises(UserError, match=r"imitate\(\)"):
        made(method="sft").learn([])


def test_given_advantages_stay_and_estimated_ones_are_estimated_again() -> None:
    trainer = made()
    played = groups(trainer)
    trainer.forward_backward(played)
    for number, group in enumerate(played):
        for reply in group:
            reply.advantages = [0.5] * len(reply.credit.spans)  # type: ignore[union-attr]
        with nullcontext() if number else pytest.raises(UserError, match="others have none"):
            trainer.forward_backward(played)
    assert all(set(reply.advantages) == {0.5} for reply in played[0])
    with pytest.raises(UserError, match=r"train.kl.where=reward"):
        made(kl={"weight": 1.0, "where": "reward"}).forward_backward(played)
    trainer, again = made(), groups(made())
    trainer.forward_backward(again)
    for reply in again[0]:
        reply.credit = credit_sampled(Score(1.0), reply.conversation.mask)
    trainer.forward_backward(again)
    assert {a for reply in again[0] for a in reply.advantages} == {0.0}, "all alike now"


def test_gradients_that_were_left_on_a_module_are_no_part_of_the_first_step() -> None:
    clean, left = made(), made()
    module = left.learner.module
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    again = Trainer(module, left.learner.tokenizer, max_tokens=5, lr=1e-2)
    for trainer in (clean, again):
        trainer.learn(groups(trainer))
    assert torch.equal(weights(clean), weights(again))
