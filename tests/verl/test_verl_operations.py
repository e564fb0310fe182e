"""Contracts with verl, Ray and TransferQueue behind oversight, budget, checks and watchdog; skipped without verl."""

from __future__ import annotations

import inspect

import pytest

pytest.importorskip("verl", reason="verl is not installed here: `make test-cluster`")

from upshot.verl.checks.resources import CPUS_A_RANK, GPUS_A_NODE, STORAGE_UNITS


def test_a_run_is_started_as_the_stand_in_for_the_runner_expects() -> None:
    from verl.trainer.main_ppo import run_ppo

    source = inspect.getsource(run_ppo)
    assert "runner = task_runner_class.remote()" in source and "ray.get(runner.run.remote(config))" in source


def test_the_phases_are_methods_of_verls_trainer() -> None:
    from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

    from upshot.verl.adapters.phases import PHASES

    assert [name for name in PHASES if not callable(getattr(PPOTrainerSync, name, None))] == []


def test_ranks_storage_and_controller_hold_the_cpus_that_are_counted() -> None:
    from transfer_queue.controller import TransferQueueController
    from transfer_queue.storage.simple_storage import SimpleStorageUnit
    from verl.single_controller.ray.base import RayResourcePool, ResourcePoolManager

    assert ResourcePoolManager.max_colocate_count == CPUS_A_RANK
    assert '{"CPU": self.max_colocate_count}' in inspect.getsource(RayResourcePool.get_placement_groups)
    assert inspect.signature(RayResourcePool.get_placement_groups).parameters["strategy"].default == "STRICT_PACK"
    assert [actor._default_options["num_cpus"] for actor in (TransferQueueController, SimpleStorageUnit)] == [1, 1]


def test_verls_default_resources_match_our_arithmetic() -> None:
    import hydra

    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        theirs = hydra.compose("ppo_trainer")
    assert theirs.trainer.n_gpus_per_node == GPUS_A_NODE and theirs.trainer.nnodes == 1
    assert theirs.transfer_queue.backend.SimpleStorage.num_data_storage_units == STORAGE_UNITS
    assert theirs.transfer_queue.backend.storage_backend == "SimpleStorage"
    assert theirs.reward.reward_model.enable_resource_pool is False and "enabled" in theirs.distillation


def test_another_runs_queue_is_found_by_this_name() -> None:
    from transfer_queue import interface

    from upshot.verl.adapters.checks import QUEUE

    assert f'name="{QUEUE[0]}", namespace="{QUEUE[1]}"' in inspect.getsource(interface)


def test_ray_tells_what_it_cannot_place_and_whether_an_actor_lives() -> None:
    from ray._private.state import actors, available_resources_per_node
    from ray.autoscaler.v2.schema import ResourceDemandSummary
    from ray.core.generated.gcs_pb2 import ActorTableData
    from ray.util.placement_group import placement_group_table

    assert all(map(callable, (actors, available_resources_per_node, placement_group_table)))
    assert ActorTableData.ActorState.Name(4) == "DEAD"
    assert isinstance(ActorTableData().death_cause.actor_died_error_context.error_message, str)
    assert "ray_task_actor_demand" in ResourceDemandSummary.__dataclass_fields__


def test_the_cause_of_an_actors_death_is_reported_for_every_kind() -> None:
    from ray.core.generated.common_pb2 import ActorDeathCause

    from upshot.verl.adapters.oversight import find_cause

    cause = ActorDeathCause()
    assert find_cause(cause) == "nothing of the cause"
    cause.oom_context.error_message = "the node was low on memory"
    assert find_cause(cause) == "the node was low on memory"
    killed = ActorDeathCause()
    killed.actor_died_error_context.error_message = "killed by SIGKILL"
    assert find_cause(killed) == "killed by SIGKILL"


def test_what_a_helpers_actor_raises_arrives_as_it_was_raised() -> None:
    import asyncio

    import cloudpickle
    from ray.exceptions import RayTaskError

    from upshot.config.model_spec import ModelSpec
    from upshot.models.base import ModelCallError, Request
    from upshot.verl.adapters.helpers import BorrowedHelper

    class Actor:
        """Its method raises what Ray would raise."""

        @property
        def generate(self) -> Actor:
            return self

        async def remote(self, request: Request) -> None:
            raised = cloudpickle.loads(cloudpickle.dumps(ModelCallError("too_long", "9 ids")))
            raise RayTaskError("generate", "traceback", raised).as_instanceof_cause()

    helper = BorrowedHelper(ModelSpec(model="smollm2-135m"), Actor())
    with pytest.raises(ModelCallError, match="too_long: 9 ids") as failed:
        asyncio.run(helper.generate(Request([1])))
    assert failed.value.reason == "too_long" and type(failed.value) is ModelCallError


def test_every_end_of_a_server_is_reported_as_its_death() -> None:
    import asyncio

    from ray.exceptions import OutOfMemoryError

    from upshot.core.errors import UserError
    from upshot.verl.adapters.loop import Servers

    class Manager:
        """Ray ended its server."""

        async def generate(self, request_id: str, **more: object) -> None:
            raise OutOfMemoryError("the node was low\non memory")

    with pytest.raises(UserError, match=r"a rollout server died.*--resume.*the node was low on memory"):
        asyncio.run(Servers(Manager()).generate("x", prompt_ids=[1], sampling_params={}))
