"""Groups that teach nothing, importance weights, and the divergence subtracted from the reward."""

from __future__ import annotations

import itertools
import json
import math
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.training.workshop import assert_same_steps, metrics, recipe
from upshot.cli import main
from upshot.config.recipe import ImportanceConfig, Recipe, TrainConfig
from upshot.core.conversation import Conversation, Message, Row, Sample, derive_seed
from upshot.core.score import Score
from upshot.rewards.credit import Credit, Reward, Span, credit_turns
from upshot.rollout.credit.rules import is_flat
from upshot.rollout.reply import Branch, Rollout
from upshot.run.run import train
from upshot.training.learner.batch import Datum
from upshot.training.loops.dynamic_sampling import is_replaceable, other_rows, replace_flat
from upshot.training.metrics.step import summarise
from upshot.training.objectives.kl import charge_credit
from upshot.training.objectives.objectives import set_importance, weigh_tokens


def group(name: str, *rewards: float | None) -> list[Rollout]:
    scores = [Score.missing("timeout") if r is None else Score(r) for r in rewards]
    return [Rollout(Conversation(Row(name, ())), credit=Credit({"main": s}, (Span(0, 1),))) for s in scores]


def test_a_group_is_flat_if_all_its_replies_score_alike() -> None:
    assert is_flat(group("a", 1.0, 1.0, None)) and is_flat(group("a", 1.0)) and is_flat([])
    assert not is_flat(group("a", 1.0, 0.5))
    apart = group("a", 1.0, 1.0)
    for reply, value in zip(apart, (0.0, 1.0), strict=True):
        reply.credit = Credit({"main": Score(1.0), "classmate": Score(value)}, (Span(0, 1),))
    assert not is_flat(apart), "the classmate tells them apart"


@given(st.integers(0, 9), st.integers(0, 5), st.sets(st.sampled_from("bdehk")))
def test_other_rows_are_played_in_place_of_flat_groups(seed: int, rounds: int, varied: set[str]) -> None:
    ids = list("abcdefghijk")
    groups = [group(name, 0.0, float(name in varied)) for name in "abc"]
    tried: set[str] = set("abc")
    played: list[str] = []
    for number in range(1, rounds + 1):
        flat = [place for place, own in enumerate(groups) if is_replaceable(own)]
        places = other_rows(groups, ids, tried, 0, number, seed)
        assert len(places) == min(len(flat), 11 - 3 - len(played)), "one for each flat group, while rows are left"
        played += [ids[place] for place in places]
        replace_flat(groups, [group(ids[place], 0.0, float(ids[place] in varied)) for place in places])
    names = [own[0].conversation.row.id for own in groups]
    assert len(set(names)) == 3
    assert len(set(played)) == len(played) and tried == {*"abc", *played}, "no row is played twice"
    assert all(
        name == first or (name in varied and first not in varied) for name, first in zip(names, "abc", strict=True)
    )
    assert all(reply.group == place for place, own in enumerate(groups) for reply in own if names[place] not in "abc")


def test_a_group_with_a_missing_reward_is_never_replaced() -> None:
    assert other_rows([group("a", None, None)], ["a", "x"], {"a"}, 0, 1, 0) == []
    assert not is_replaceable(group("a", 1.0, 1.0, None)) and is_replaceable(group("a", 1.0, 1.0))


def half_flat(folder: Path, **changes: Any) -> Recipe:
    more = {"reward": {"metrics": ["tests.training.helpers:HalfFlat"]}, "futures": {"rounds": 0}}
    return recipe(folder, warm=False, more=more, prompts_per_step=4, group_size=2, save={"every": 1}, **changes)


def test_a_run_learns_from_other_rows_in_place_of_flat_ones_and_resumes_alike(tmp_path: Path) -> None:
    for name, steps in (("whole", 3), ("halves", 1)):
        train(half_flat(tmp_path / name, dynamic_sampling=4, steps=steps))
    train(half_flat(tmp_path / "plain", steps=1))
    assert main(["train", "--quiet", "--resume", str(tmp_path / "halves"), "train.steps=3"]) == 0
    assert_same_steps(metrics(tmp_path / "whole"), metrics(tmp_path / "halves"))
    lines = [json.loads(line) for line in (tmp_path / "whole" / "rollouts.jsonl").read_text().splitlines()]
    for step, own in itertools.groupby(lines, lambda line: line["step"]):
        rows = {line["group"]: line["row"] for line in own}
        assert sorted(rows) == [0, 1, 2, 3] and len(set(rows.values())) == 4, f"step {step}: four groups, no row twice"
        numbers = [derive_seed(0, row) for row in rows.values()]
        assert all(number % 2 == 0 or number % 32 == 1 for number in numbers), "flat ones are gone, missing ones stay"
    flat = {name: [line["reward/flat_groups"] for line in metrics(tmp_path / name)] for name in ("whole", "plain")}
    missing = [line["reward/missing"] for line in metrics(tmp_path / "whole")]
    assert max(flat["plain"]) > 0
    for share, lost, line in zip(flat["whole"], missing, metrics(tmp_path / "whole"), strict=True):
        assert share in (0, lost / 8) and line["train/sequences"] == 8 - lost, "what is learned from is what was kept"


@given(st.lists(st.floats(-3, 3), min_size=1, max_size=6), st.sampled_from(["token", "sequence"]))
def test_importance_of_a_sequence_is_the_product_of_its_tokens(differences: list[float], level: Any) -> None:
    """As the data of a step are weighted before an update; during the update it is the same function."""
    config = TrainConfig(importance={"rule": "truncate", "level": level, "high": 1e9})
    datum = Datum([7] * (len(differences) + 1), [0, *[1] * len(differences)], [0.0, *(-x for x in differences)])
    set_importance(SimpleNamespace(config=config, logprobs=lambda data: [[0.0] * len(d.ids) for d in data]), [datum])  # type: ignore[arg-type]
    tokens = [math.exp(x) for x in differences]
    expected = [math.prod(tokens)] * len(tokens) if level == "sequence" else tokens
    assert datum.weights[1:] == pytest.approx(expected, rel=1e-6)
    assert datum.sampled[1:] == [-x for x in differences] and datum.old == [0.0] * len(datum.ids)


def test_outside_the_bounds_a_weight_is_cut_or_the_token_masked() -> None:
    bounds = {"low": 0.5, "high": 2.0}
    truncate, mask = (ImportanceConfig(rule=rule, **bounds) for rule in ("truncate", "mask"))  # type: ignore[arg-type]
    ratios = torch.tensor([0.1, 1.0, 5.0]).log()
    assert weigh_tokens(ratios, ratios, truncate)[0].tolist() == [0.5, 1.0, 2.0]
    assert weigh_tokens(ratios, ratios, mask)[0].tolist() == [0.0, 1.0, 0.0]


def test_a_group_whose_forks_still_teach_is_not_flat() -> None:
    alike = group("a", 1.0, 1.0)
    assert is_replaceable(alike)
    branches = [
        Branch(
            Conversation(Row("a", ())), (at,), 1, Reward(Score(value)), Credit({"main": Score(value)}, (Span(0, 1),))
        )
        for at, value in enumerate((0.0, 1.0))
    ]
    alike[0].siblings = [branches]
    assert not is_flat(alike) and not is_replaceable(alike)
    assert summarise([alike])["reward/flat_groups"] == 0
    alike[0].siblings = [[branches[0], branches[0]]]
    assert is_replaceable(alike) and summarise([alike])["reward/flat_groups"] == 1


def test_groups_without_any_reward_are_missing_and_not_flat() -> None:
    assert "reward/flat_groups" not in summarise([group("a", None, None)])
    assert summarise([group("a", None, None), group("b", 1.0, 0.0)])["reward/flat_groups"] == 0


def test_a_reply_pays_for_its_divergence_and_a_turn_for_what_comes_after_it() -> None:
    costs = [0.0, 0.0, 0.1, 0.2, 0.4]
    parts = {"main": Score(1.0), "classmate": Score(0.5)}
    paid = charge_credit(Credit(parts, (Span(2, 4, ("main", "classmate")), Span(4, 5))), costs)
    assert paid.parts["main"].value == pytest.approx(0.3) and paid.parts["classmate"].value == 0.5
    turns = Credit(
        {"turn 1": Score(1.0), "turn 2": Score.missing("timeout")}, (Span(2, 3, ("turn 1",)), Span(4, 5, ("turn 2",)))
    )
    paid = charge_credit(turns, costs)
    assert paid.parts["turn 1"].value == pytest.approx(0.3) and paid.parts["turn 2"].is_missing


@given(
    st.lists(st.tuples(st.floats(-1, 1), st.floats(-1, 1)), min_size=1, max_size=5), st.sampled_from([0.0, 0.9, 1.0])
)
def test_a_turn_pays_for_later_ones_as_it_earns_from_them(turns: list[tuple[float, float]], gamma: float) -> None:
    """Charging it after crediting gives the same result as charging every turn's own reward before."""
    rng = random.Random(0)
    conversation = Conversation(Row("r", (Message("user", "?"),)))
    costs: list[float] = []
    for _, cost in turns:
        ids, context = tuple(range(rng.randint(1, 4))), tuple(range(rng.randint(1, 3)))
        conversation.say(Message("assistant", "!"), Sample(context, ids, (0.0,) * len(ids), "stop"))
        costs += [0.0] * len(context) + [cost / len(ids)] * len(ids)
    before = credit_turns([Score(reward) for reward, _ in turns], conversation, gamma)
    paid = charge_credit(before, costs)
    expected = credit_turns([Score(reward - cost) for reward, cost in turns], conversation, gamma)
    found = {name: score.value for name, score in paid.parts.items()}
    assert found == pytest.approx({name: score.value for name, score in expected.parts.items()}, abs=1e-9)
