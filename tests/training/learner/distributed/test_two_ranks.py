"""Two processes on the CPU train like one: the same replies, and losses that differ only by rounding.

In float32, sums of gradients are added in a different order, which Adam's first steps, based on the sign of a gradient,
amplify. So losses, norms and rewards are compared to 1e-4 of their size, resumed runs exactly.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.learner.distributed.rank_runs import Job, two_ranks
from tests.training.workshop import metrics
from tests.training.workshop import recipe_on_cpu as recipe
from upshot.config.recipe import Recipe
from upshot.run.folder import RunFolder
from upshot.run.run import train

LORA = {"lora": {"r": 2}}
ASKED = {"models": {"user": "scripted:tests.training.helpers:customer"}, "futures": {"samples": 2, "rounds": 1}}
ASKED["futures"] |= {"user": "llm"}
REWARD = {"reward": {"metrics": [{"name": "tests.training.helpers:Lottery"}]}}
PAIRS = [
    {"prompt": "i want a lamp", "chosen": "which size ?", "rejected": "here is a red lamp"},
    {"prompt": "i want a red lamp", "chosen": "small or large ?", "rejected": "here"},
    {"prompt": "a lamp", "chosen": "which colour and which size ?", "rejected": "a red lamp"},
]
NAMES, FURTHER = ("rl", "asked", "ppo", "dpo", "sft"), ("online-dpo", "ahead")
BUDGET = 60
SMALL: dict[str, Any] = {
    "steps": 2,
    "save": {"every": 0},
    "token_budget": 48,
    "optimizer": {"grad_clip": 0.05},
    "lr": 3e-4,
}
"""Several micro-batches per rank, not equally many on each, and a gradient that is always clipped."""


def recipes(folder: Path, pairs: str) -> dict[str, Recipe]:
    """Every method, with all weights and with adapters, and everything that needs totals over the step."""
    evaluated = {"eval": {"every": 2, "rows": 5, "temperature": 1.0, "samples": 2}}
    whole_step = {"advantage": {"name": "reinforce++"}, "kl": 0.05, "minibatches": 2, "importance": "truncate"}
    return {
        "rl": recipe(folder / "rl", more={**REWARD, **evaluated}, dynamic_sampling=1, **whole_step, **SMALL),
        "asked": recipe(
            folder / "asked", warm=False, more={**ASKED, **REWARD}, kl={"weight": 0.1, "where": "reward"}, **SMALL
        ),
        "ppo": recipe(folder / "ppo", warm=False, method="ppo", kl=0.05, more={"model": LORA, **REWARD}, **SMALL),
        "online-dpo": recipe(folder / "online-dpo", warm=False, method="online-dpo", more=REWARD, **SMALL),
        "dpo": recipe(folder / "dpo", warm=False, method="dpo", data=pairs, more={"model": LORA}, **SMALL),
        "sft": recipe(folder / "sft", warm=False, method="sft", more={"eval": {"every": 2, "rows": 3}}, **SMALL),
        "ahead": recipe(folder / "ahead", warm=False, async_steps=1, more=REWARD, **SMALL),
    }


def resumable(folder: Path) -> Recipe:
    """With noise of each rank's own, and adapters."""
    noisy = {"model": {**LORA, "lora": {"r": 2, "dropout": 0.5}}}
    settings = {"steps": 4, "save": {"every": 1, "keep": 9}, "prompts_per_step": 4}
    return recipe(folder, warm=False, method="sft", more=noisy, **settings)


def jobs_beside_one(place: Path, names: Sequence[str]) -> list[Job]:
    """These recipes on two ranks, under `two`; a run of one rank for each is made under `alone`."""
    pairs = place / "pairs.jsonl"
    pairs.write_text("\n".join(map(json.dumps, PAIRS)))
    one, two = (recipes(place / who, str(pairs)) for who in ("alone", "two"))
    for name in names:
        train(one[name])
    return [(two[name], "new") for name in names]


@pytest.fixture(scope="module")
def more(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Further runs."""
    place = tmp_path_factory.mktemp("more")
    two_ranks(jobs_beside_one(place, FURTHER), place / "jobs")
    return place


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs of all tests that are not slow, by one pair of processes."""
    place = tmp_path_factory.mktemp("ranks")
    jobs = jobs_beside_one(place, NAMES)
    train(recipe(place / "moved", warm=False, more=REWARD, **{**SMALL, "steps": 1}))
    longer = recipe(place / "moved", warm=False, more=REWARD, **SMALL)
    jobs += [(longer, "resume"), (resumable(place / "straight"), "new"), (resumable(place / "again"), "straight 2")]
    spent = {**ASKED, **REWARD, "budget": {"max_calls": BUDGET}}
    jobs.append((recipe(place / "spent", warm=False, more=spent, **{**SMALL, "steps": 50}), "fails"))
    two_ranks(jobs, place / "jobs")
    return place


def close(one: Mapping[str, Any], two: Mapping[str, Any]) -> bool:
    def alike(left: Any, right: Any) -> bool:
        return bool(left == right or (isinstance(left, float) and left == pytest.approx(right, 1e-4, 1e-4)))

    return one.keys() == two.keys() and all(alike(value, two[key]) for key, value in one.items())


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_write_the_same_lines_as_one(name: str, place: Path) -> None:
    same_lines(place, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", FURTHER)
def test_two_ranks_train_like_one_by_further_methods(name: str, more: Path) -> None:
    same_lines(more, name)
    same_replies(more, name)


def same_lines(place: Path, name: str) -> None:
    one, two = (metrics(place / who / name) for who in ("alone", "two"))
    assert len(one) == len(two)
    for left, right in zip(one, two, strict=True):
        assert close(left, right), {k: (v, right.get(k)) for k, v in left.items() if v != right.get(k)}
    norms = [line["train/grad_norm"] for line in one if "train/grad_norm" in line]
    assert norms and min(norms) > SMALL["optimizer"]["grad_clip"], "all were clipped"


@pytest.mark.parametrize("name", ["rl", "asked", "ppo"])
def test_two_ranks_play_the_same_replies_as_one(name: str, place: Path) -> None:
    same_replies(place, name)


def same_replies(place: Path, name: str) -> None:
    one, two = (
        [json.loads(line) for line in (place / who / name / "rollouts.jsonl").read_text().splitlines()]
        for who in ("alone", "two")
    )
    assert [(r["key"], r["messages"], r["futures"]) for r in one] == [
        (r["key"], r["messages"], r["futures"]) for r in two
    ]


@pytest.mark.parametrize("name", ["rl", "ppo", "dpo"])
def test_the_checkpoint_of_two_ranks_equals_that_of_one(name: str, place: Path) -> None:
    one, two = (_saved(place / who / name) for who in ("alone", "two"))
    assert one["steps"] == two["steps"]
    assert one["optimizer"]["shapes"] == two["optimizer"]["shapes"]
    moments = [state["optimizer"]["adam"] for state in (one, two)]
    assert moments[0].keys() == moments[1].keys()
    for number, left in moments[0].items():
        for key, value in left.items():
            assert torch.allclose(value, moments[1][number][key], rtol=1e-3, atol=1e-5), (number, key)


def test_a_run_of_one_rank_resumes_on_two(place: Path) -> None:
    train(recipe(place / "moved-straight", warm=False, more=REWARD, **SMALL))
    for left, right in zip(metrics(place / "moved-straight"), metrics(place / "moved"), strict=True):
        assert close(left, right)


def test_a_run_of_two_ranks_resumes_exactly_on_two(place: Path) -> None:
    assert metrics(place / "again") == metrics(place / "straight"), "each rank's dropout included"


def test_a_run_of_two_ranks_resumes_on_one(place: Path) -> None:
    shutil.copytree(place / "two" / "asked", place / "back")
    folder = RunFolder.open(place / "back")
    longer = recipe(
        place / "back",
        warm=False,
        more={**ASKED, **REWARD},
        kl={"weight": 0.1, "where": "reward"},
        **{**SMALL, "steps": 3},
    )
    train(longer, folder)
    train(longer.model_copy(update={"run_dir": str(place / "three")}))
    for left, right in zip(metrics(place / "three"), metrics(place / "back"), strict=True):
        assert close(left, right)


def test_ranks_share_one_budget_and_a_run_that_spent_it_can_resume(place: Path) -> None:
    folder = RunFolder.open(place / "spent")
    assert folder.spent()["calls"] == BUDGET
    told = json.loads((folder.path / "status.json").read_text())
    assert told["state"] == "stopped" and f"the budget of {BUDGET} calls is used up" in told["reason"]
    latest = folder.latest()
    assert latest is not None and latest.step == metrics(folder.path)[-1]["step"] > 0


def _saved(folder: Path) -> dict[str, Any]:
    latest = RunFolder.open(folder).latest()
    assert latest is not None
    return dict(torch.load(latest.path / "learner.pt", weights_only=True))
