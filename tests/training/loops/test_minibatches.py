"""A round of updates in minibatches: as many as the recipe says, logged as one."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.training.workshop import datum, learner, update
from upshot.config.recipe import TrainConfig
from upshot.training.learner.batch import Datum
from upshot.training.learner.learner import Learner
from upshot.training.loops.dpo import Dpo
from upshot.training.loops.phase import Lesson, minibatches
from upshot.training.loops.ppo import Ppo
from upshot.training.loops.sft import Sft
from upshot.training.metrics.alarms import bad_step
from upshot.training.objectives.objectives import Objective, PolicyGradient

LENGTHS = (5, 9, 6, 14, 8, 7, 11, 4, 13)


@given(st.integers(0, 40), st.integers(1, 12), st.integers(0, 9))
def test_there_are_as_many_minibatches_as_asked_for_of_nearly_one_size(count: int, parts: int, seed: int) -> None:
    found = minibatches(range(count), parts, seed)
    assert len(found) == min(parts, count)
    assert sorted(i for part in found for i in part) == list(range(count))
    assert not found or max(map(len, found)) - min(map(len, found)) <= 1


def data(count: int = 9) -> list[Datum]:
    return [datum(length, seed) for seed, length in enumerate(LENGTHS[:count])]


def test_nine_sequences_in_four_parts_make_four_updates() -> None:
    own = learner(minibatches=4)
    update(own, Lesson([[d] for d in data()], lambda: PolicyGradient(own.config)), seed=0)
    assert own.steps == 4


@pytest.mark.parametrize("norm", ["sequence", "token", "constant"])
@pytest.mark.parametrize("kind", ["sft", "rl", "ppo", "dpo"])
def test_minibatches_log_the_same_as_all_their_data_at_once(kind: str, norm: str) -> None:
    """With a learning rate of 0 the weights do not change, so one large batch gives the same."""
    found = []
    for parts in (1, 3, 4):
        config: dict[str, Any] = {"lr": 1e-30, "length_norm": norm, "kl": 0.1, "minibatches": parts}
        own = learner(value_head=kind == "ppo", **config)
        made: dict[str, Any] = {"sft": Sft, "rl": PolicyGradient, "ppo": Ppo, "dpo": Dpo}
        units = [[d] for d in data()] if kind != "dpo" else [data()[i : i + 2] for i in range(0, 8, 2)]
        sequences, tokens = sum(map(len, units)), sum(sum(d.mask) for unit in units for d in unit)

        def objective(own: Learner = own, make: Any = made[kind]) -> Objective:
            return make() if kind == "sft" else make(own.config)  # type: ignore[no-any-return]

        logs = update(own, Lesson(units, objective), seed=1)
        assert logs["train/skipped"] == 0 and own.steps == parts
        assert (logs["train/sequences"], logs["train/tokens"]) == (sequences, tokens), "counts are summed"
        found.append({k: v for k, v in logs.items() if not k.startswith(("train/", "policy/drift"))})
    for other in found[1:]:
        assert other == pytest.approx(found[0], rel=1e-4, abs=1e-6)


def test_updates_that_are_skipped_are_counted_and_the_guard_sees_them() -> None:
    own = learner(minibatches=4)
    broken = [datum(6, seed) for seed in range(4)]
    for one in broken[:3]:
        one.advantages = [math.inf] * 6
    before = [p.detach().clone() for p in own.parameters]
    logs = update(own, Lesson([[d] for d in broken], lambda: PolicyGradient(own.config)), seed=0)
    assert logs["train/skipped"] == 3 and own.steps == 4
    assert not all(torch.equal(a, b) for a, b in zip(before, own.parameters, strict=True)), "the fourth was learned"
    assert bad_step(logs) is not None


def test_one_minibatch_logs_exactly_its_own_values() -> None:
    one, other = learner(), learner()
    logs = update(one, Lesson([[d] for d in data()], Sft), seed=0)
    expected = other.forward_backward([[d] for d in data()], Sft()) | other.step()
    assert {key: logs[key] for key in expected} == expected


def test_the_drift_of_a_round_is_that_before_its_first_update() -> None:
    own = learner(lr=0.05, minibatches=3)
    some = data()
    for one, old in zip(some, own.logprobs(some), strict=True):
        one.old = old
    logs = update(own, Lesson([[d] for d in some], lambda: PolicyGradient(own.config)), seed=0)
    assert logs["policy/drift_max"] < 1e-5 < logs["policy/kl_to_sampler"]


def test_nothing_to_learn_from_makes_no_update() -> None:
    own = learner(minibatches=2)
    before = [p.detach().clone() for p in own.parameters]
    given = Lesson([], lambda: PolicyGradient(TrainConfig()), {"policy/x": 1.0})
    assert update(own, given, seed=0) == {"policy/x": 1.0, "train/sequences": 0.0, "train/tokens": 0.0}
    assert all(torch.equal(a, b) for a, b in zip(before, own.parameters, strict=True))


def test_the_learning_rate_falls_by_the_steps_of_the_run_also_where_some_have_little_to_learn_from() -> None:
    """Online DPO may have no pair in a step, and fewer pairs than minibatches."""
    own = learner(steps=5, minibatches=3, lr=1.0, schedule="linear")
    rates = []
    for count in (9, 0, 2, 9, 9):
        logs = update(own, Lesson([[d] for d in data(count)], lambda: PolicyGradient(own.config)), seed=0)
        rates.append(logs.get("train/lr"))
    assert [rate if rate is None else round(15 * rate, 6) for rate in rates] == [13, None, 8, 4, 1]
