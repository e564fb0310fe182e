"""Contracts with verl as pip installs it, one a hook that we use. Run by `make test-cluster`, skipped without verl."""

from __future__ import annotations

import asyncio
import inspect
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="verl is not installed here: `make test-cluster`")

from tests.cluster.test_worker import HALF_SAID, TOKENIZER, Manager, shopkeeper
from upshot.cluster.config import RECIPE, Place, compose
from upshot.cluster.parquet import record_of
from upshot.config import load
from upshot.train.folder import RunFolder

OWN = ["task.rows_per_split=64", "task.vague=0", "warm_start=null", "model.path=/model", "model.dtype=float32"]
PLACE = Place("/run", rows=64, prompt_tokens=40, context=256)
MORE = ["actor_rollout_ref.rollout.name=vllm", "trainer.n_gpus_per_node=1"]


def composed() -> tuple[Any, Any]:
    """Our plan and verl's config made of it."""
    import hydra

    plan = compose(load("quickstart", OWN).recipe, PLACE, MORE)
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        return plan, hydra.compose("ppo_trainer", overrides=plan.overrides())


@pytest.fixture
def recipe_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder.create(load("quickstart", [*OWN, f"run_dir={tmp_path / 'run'}"]).recipe)
    monkeypatch.setenv(RECIPE, str(folder.path / "recipe.yaml"))


def test_every_setting_lands_where_verl_reads_it() -> None:
    from omegaconf import OmegaConf

    plan, theirs = composed()
    for setting in plan.settings:
        found = OmegaConf.select(theirs, setting.key)
        assert (OmegaConf.to_container(found) if OmegaConf.is_config(found) else found) == setting.value, setting.key


def test_the_registrations_are_under_our_name() -> None:
    from verl.experimental.agent_loop.agent_loop import _agent_loop_registry
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    import upshot.cluster.adapters.register  # noqa: F401

    assert _agent_loop_registry["upshot"]["_target_"] == "upshot.cluster.adapters.loop.UpshotLoop"
    assert get_adv_estimator_fn("upshot").__module__ == "upshot.cluster.adapters.estimator"


def test_the_server_client_takes_ids_by_these_names() -> None:
    from verl.workers.rollout.llm_server import LLMServerClient
    from verl.workers.rollout.replica import TokenOutput

    assert {"request_id", "prompt_ids", "sampling_params"} <= set(
        inspect.signature(LLMServerClient.generate).parameters
    )
    assert {"token_ids", "log_probs", "stop_reason", "extra_fields"} <= set(TokenOutput.model_fields)


@pytest.mark.usefixtures("recipe_file")
def test_the_loop_gives_verl_the_servers_ids_and_a_score_a_token() -> None:
    from verl.experimental.agent_loop.agent_loop import DictConfigWrap

    from upshot.cluster.adapters.loop import UpshotLoop

    _, config = composed()
    manager = Manager(shopkeeper(HALF_SAID), TOKENIZER)
    record = record_of(HALF_SAID, 0, "train")
    given = {"raw_prompt": record["prompt"], "extra_info": record["extra_info"], "uid": "u", "session_id": 0}

    async def run() -> Any:
        whole, data = DictConfigWrap(config), DictConfigWrap(config.data)
        loop = UpshotLoop(whole, manager, TOKENIZER, None, None, data)
        return await loop.run({"logprobs": True, "repetition_penalty": 1.0}, global_steps=1, **given)

    out = asyncio.run(run())
    assert out.prompt_ids == manager.asked[0][1] and out.response_ids == manager.asked[0][3]
    assert manager.asked[0][2]["logprobs"] is True and manager.asked[0][2]["max_tokens"] == 12
    row = out.as_dict()
    assert row["rm_scores"].tolist()[:-1] == [0.0] * (len(out.response_ids) - 1)
    assert row["rm_scores"].sum().item() == pytest.approx(out.reward_score)
    assert row["extra_fields"]["min_global_steps"] == 1
    assert row["extra_fields"]["reward_extra_info"]["verifier"] == 1.0


@pytest.mark.usefixtures("recipe_file")
def test_the_estimator_gives_a_lone_survivor_nothing() -> None:
    import numpy as np
    import torch

    from upshot.cluster.adapters.estimator import estimate

    scores = torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 5.0], [0.0, 0.0]])
    mask = torch.tensor([[1, 1], [1, 1], [1, 1], [0, 0]])
    found, returns = estimate(token_level_rewards=scores, response_mask=mask, index=np.array(["a", "a", "b", "pad0"]))
    assert found.tolist() == [[0.5, 0.5], [-0.5, -0.5], [0.0, 0.0], [0.0, 0.0]]  # the quickstart is dr-grpo
    assert returns.shape == scores.shape
