"""A run whose helpers do not fit beside the policy: planned, refused, or played in turns with the same replies."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny import tiny_parts
from tests.training.workshop import recipe
from upshot.cli import main
from upshot.config.recipe import Recipe, TinyConfig
from upshot.core.errors import UserError
from upshot.models.tiny import tiny_config, tiny_model
from upshot.run.run import RunServices, train
from upshot.serving.swap.pool import ModelPool
from upshot.training.learner.memory import fit
from upshot.training.learner.memory.fit import list_settings, plan_of
from upshot.training.learner.memory.plan import CONTEXT, SLACK, MemoryJob, MemoryPlan, make_plan
from upshot.training.learner.memory.shape import ModelShape

ROLES = ("user", "judge", "a", "b")
MIB = 2**20


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Four helper models of random weights, of growing sizes."""
    root = tmp_path_factory.mktemp("helpers")
    _, tokenizer, _, _ = tiny_parts()
    for number, role in enumerate(ROLES):
        shape = TinyConfig(hidden=32 + 32 * number, layers=1 + number, heads=2, mlp=32)
        tiny_model(shape, tokenizer, number).save_pretrained(root / role)
        tokenizer.save_pretrained(root / role)
    return {role: str(root / role) for role in ROLES}


def made(folder: Path, models: dict[str, str], memory: int = 0) -> Recipe:
    more = {
        "models": models,
        "model": {
            "tiny": {"hidden": 32, "layers": 1, "heads": 2, "mlp": 32},
            "dtype": "float32",
            "memory_gb": memory / 2**30,
        },
        "reward": {"metrics": [{"name": "tests.serving.swap.helpers:Poll"}]},
        "futures": {"samples": 1, "rounds": 0},
    }
    return recipe(folder, steps=2, prompts_per_step=2, group_size=3, warm=False, more=more)


def words() -> int:
    return len(tiny_parts()[1])


def shape_of(own: Recipe) -> ModelShape:
    return ModelShape(tiny_config(own.model.tiny, words()))


def plan(own: Recipe, memory: int) -> MemoryPlan:
    return plan_of(MemoryJob(own, shape_of(own), 4), memory)


def tight(own: Recipe) -> int:
    """Too little memory to hold everything: every helper takes turns with every other."""
    job = MemoryJob(own, shape_of(own), 4)
    least = min(make_plan(job, setting, job.least).peak for setting in list_settings(job))
    return CONTEXT + int((least + MIB) / (1 - SLACK))


def rollouts(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
    return [{key: line[key] for key in ("step", "messages", "reward")} for line in lines]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, folders: dict[str, str]) -> list[dict[str, Any]]:
    """The replies of a run that keeps all its helpers loaded."""
    place = tmp_path_factory.mktemp("plain")
    train(made(place, folders))
    return rollouts(place)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU batches form by time, and rounding follows them")
@pytest.mark.parametrize("kind", ["swap", "leave"])
def test_a_run_whose_helpers_take_turns_plays_the_same_replies(
    tmp_path: Path, folders: dict[str, str], plain: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    pools: list[ModelPool] = []
    pause, plan_of = RunServices.pause, fit.plan_of

    def chosen(*args: Any, **more: Any) -> MemoryPlan:
        found = plan_of(*args, **more)
        assert found.layout is not None and found.layout.conflicts
        return replace(found, setting=replace(found.setting, helpers=kind))

    async def look(self: RunServices) -> None:
        await pause(self)
        assert self._open is not None
        _, policy = self._open
        assert policy.pool is not None
        pools.append(policy.pool)
        assert pools[-1].arena.there == (kind == "swap"), "the learner has what helpers leave"

    monkeypatch.setattr(fit, "plan_of", chosen)
    monkeypatch.setattr(RunServices, "pause", look)
    train(made(tmp_path / "pooled", folders, tight(made(tmp_path, folders))))
    assert pools and all(pool.arena.most <= pool.arena.layout.size for pool in pools)
    assert rollouts(tmp_path / "pooled") == plain
    lines = [json.loads(line) for line in (tmp_path / "pooled" / "metrics.jsonl").read_text().splitlines()]
    assert all(line["time/pool/swaps"] >= 1 and line["time/pool/swap_s"] > 0 for line in lines)
    assert all(line["time/pool/waiting_s"] >= 0 and line["time/pool/swapped_gib"] > 0 for line in lines)


def test_helpers_that_fit_stay_and_what_cannot_fit_even_in_turns_is_refused_with_the_arithmetic(
    tmp_path: Path, folders: dict[str, str]
) -> None:
    own = made(tmp_path, folders)
    assert plan(own, 8 * 2**30).setting.helpers == "stay"
    found = plan(own, tight(own))
    assert found.setting.helpers == "swap" and found.layout is not None
    assert found.peak <= found.limit and len(found.layout.conflicts) > 1
    assert sum(part.host for part in found.parts) > 0 and not set(ROLES) & set(found.helper_kv)
    with pytest.raises(UserError, match=r"does not fit into .*; it fits with .*helper models elsewhere"):
        plan(own, tight(own) - 20 * MIB)


def test_memory_for_roles_that_share_a_model_is_planned_once(tmp_path: Path, folders: dict[str, str]) -> None:
    own = made(tmp_path, {"user": folders["user"], "judge": folders["user"]})
    assert list(plan(own, 8 * 2**30).helper_kv) == ["user"]


def test_keys_and_values_that_the_recipe_gives_a_helper_are_in_the_plan(
    tmp_path: Path, folders: dict[str, str]
) -> None:
    own = made(tmp_path, folders)
    given = own.models["b"].model_copy(update={"kv_gb": 0.5})
    more = own.model_copy(update={"models": {**own.models, "b": given}})
    sizes = [plan(each, 8 * 2**30) for each in (own, more)]
    assert sizes[1].peak > sizes[0].peak + 2**28 and "b" not in {n for n, kv in sizes[1].helper_kv.items() if kv}
    in_turns = plan(more, tight(more))
    assert in_turns.layout is not None
    assert {place.name for place in in_turns.layout.regions if place.size > 2**29} == {"b"}


def test_pool_plan_prints_every_model_with_its_place_or_refuses(
    tmp_path: Path, folders: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    own = made(tmp_path, folders)
    file = tmp_path / "recipe.yaml"
    file.write_text(own.model_dump_json(exclude_defaults=True))
    memory = tight(own) / 2**30
    assert main(["pool", "plan", str(file), f"model.memory_gb={memory}"]) == 0
    said = capsys.readouterr().out
    for word in ("weights", "optimizer", *ROLES, "of the arena, in turn with", "never together", "helpers' arena"):
        assert word in said
    assert main(["pool", "plan", str(file), "model.memory_gb=1.01"]) == 2
    assert "does not fit" in capsys.readouterr().err


def test_pool_plan_refuses_a_model_whose_size_cannot_be_known(
    tmp_path: Path, folders: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name on the hub used to be silently left out of the sum, and the rest "fitted"."""

    def fetch(name: str, file: str) -> str:
        raise OSError(f"no network for {name}")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fetch)
    file = tmp_path / "recipe.yaml"
    file.write_text(made(tmp_path, folders).model_dump_json(exclude_defaults=True))
    assert main(["pool", "plan", str(file), "models.user=local:nobody/knows-7B", "model.memory_gb=80"]) == 2
    said = capsys.readouterr().err
    assert "models.user: the size of 'local:nobody/knows-7B' is not known" in said and "config.json" in said
    assert main(["pool", "plan", str(file), "models.user=Qwen/Qwen3-4B", "model.memory_gb=80"]) == 2
    assert "models.user=local:Qwen/Qwen3-4B" in capsys.readouterr().err
