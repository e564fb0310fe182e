"""Contracts with verl for runs on a CPU and for our engine as its rollout backend. Skipped without verl."""

from __future__ import annotations

import asyncio
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="verl is not installed here: `make test-cluster`")

from tests.support.verl_cpu.settings import ENVIRONMENT, list_words, ray_settings, settings
from tests.verl.test_sampler import PARAMS, TOKENIZER, model, prompt
from upshot.config.load import load_recipe
from upshot.core.errors import UserError
from upshot.verl.config import compose
from upshot.verl.plan import ClusterPlace

PLACE = ClusterPlace("/run", rows=64, prompt_tokens=40, context=256)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    model(0).save_pretrained(path)
    TOKENIZER.save_pretrained(path)
    return path


def test_settings_for_a_cpu_are_where_verl_reads_them() -> None:
    import hydra
    from omegaconf import OmegaConf

    recipe = load_recipe("quickstart", ["credit.by=reply", "model.path=/m", "warm_start=null"]).recipe
    plan = compose(recipe, PLACE, list_words(2)[1:])
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        theirs = hydra.compose("ppo_trainer", overrides=plan.overrides())  # refuses a key that it does not have
    here = {key.lstrip("+"): value for key, (value, _) in (settings(2) | ray_settings(2)).items()}
    assert len(here) > 20
    assert [key for key, value in here.items() if OmegaConf.select(theirs, key) != value] == []


def python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    told = {**os.environ, **ENVIRONMENT, **env}
    return subprocess.run([sys.executable, "-c", code], env=told, capture_output=True, text=True)


def test_the_platform_is_the_cpu_where_it_is_asked_for() -> None:
    code = """
import torch.distributed, verl
from verl.plugin.platform import get_platform
from verl.utils.distributed import initialize_global_process_group_ray
initialize_global_process_group_ray()
print(type(get_platform()).__module__, torch.distributed.get_backend())
"""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "DIST_INIT_METHOD": "tcp://127.0.0.1:0"}
    found = python(code, **alone)
    assert found.stdout.split() == ["tests.support.verl_cpu.platform", "cpu:gloo"], found.stderr[-2000:]


def test_a_plug_in_that_fails_to_import_raises_an_error() -> None:
    found = python("import verl", VERL_USE_EXTERNAL_MODULES="upshot.verl.adapters.nowhere")
    assert found.returncode and "upshot.verl.adapters.nowhere" in found.stderr


def test_the_cpu_platform_is_never_chosen_unless_asked_for() -> None:
    from tests.support.verl_cpu.platform import CpuPlatform

    assert CpuPlatform().is_platform_available() is (os.environ.get("VERL_PLATFORM") == "cpu")


def test_the_backend_is_registered_under_its_name() -> None:
    from verl.workers.rollout.base import get_rollout_class
    from verl.workers.rollout.replica import get_rollout_replica_class

    from upshot.verl.adapters import rollout

    assert get_rollout_class("upshot") is rollout.UpshotRollout
    assert get_rollout_replica_class("upshot") is rollout.UpshotReplica


def test_the_server_has_every_method_that_verl_calls_on_one() -> None:
    from verl.workers.rollout import llm_server, replica

    from upshot.verl.adapters.rollout import RankServer

    text = inspect.getsource(replica.RolloutReplica) + inspect.getsource(llm_server.LLMServerClient)
    asked = set(re.findall(r"\bserver\.(\w+)\.remote", text))
    assert {"generate", "sleep", "wake_up", "abort_all_requests"} <= asked
    assert {name for name in asked if not hasattr(RankServer, name)} == set()


def test_the_server_answers_in_verls_format(folder: Path) -> None:
    from verl.workers.rollout.replica import TokenOutput

    from upshot.verl.adapters.rollout import RankServer

    async def ask() -> Any:
        server = RankServer(str(folder), "float32", "cpu", seed=0, most_tokens=8, frees=True)
        await server.sleep()
        await server.wake_up(tags=["kv_cache"])
        with pytest.raises(UserError, match="image_data"):
            await server.generate(prompt(), dict(PARAMS), "r", image_data=[1])
        return await server.generate(prompt_ids=prompt(), sampling_params=dict(PARAMS), request_id="r", image_data=None)

    out = asyncio.run(ask())
    assert isinstance(out, TokenOutput) and out.stop_reason == "completed"
    assert len(out.token_ids) == len(out.log_probs) and "global_steps" in out.extra_fields


def test_a_server_over_several_ranks_is_refused() -> None:
    from verl.workers.config import RolloutConfig

    from upshot.verl.adapters.rollout import UpshotReplica

    config = RolloutConfig(name="upshot", mode="async", tensor_model_parallel_size=2)
    with pytest.raises(UserError, match="one server a rank"):
        asyncio.run(UpshotReplica(0, config, None).launch_servers())


def test_the_trainer_hands_weights_over_by_these_names() -> None:
    from verl.workers.engine_workers import ActorRolloutRefWorker

    text = inspect.getsource(ActorRolloutRefWorker.update_weights)
    assert re.search(r"self\.rollout\.update_weights\(\s*per_tensor_param, peft_config=.*global_steps=", text)
