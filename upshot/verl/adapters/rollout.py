"""Our engine as a rollout backend of verl: `actor_rollout_ref.rollout.name=upshot`.

There is one server per rank, an actor on the rank's node and device. verl's trainer sends it the weights after every
step, through Ray's shared memory. It works the same way on a CPU and on CUDA.
"""

from __future__ import annotations

import os
from typing import Any

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.plugin.platform import get_platform
from verl.workers.rollout.base import _ROLLOUT_REGISTRY, BaseRollout
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput
from verl.workers.rollout.utils import ensure_async_iterator

from upshot.core.errors import UserError
from upshot.models.local import load_local, pick_dtype
from upshot.models.rendering import Renderer
from upshot.verl.sampler import Sampler, parts
from upshot.verl.table import BACKEND


class RankServer(Sampler):
    """The actor that samples for one rank; the sampler handles weights and pauses."""

    def __init__(self, path: str, dtype: str, device: str, seed: int, most_tokens: int, frees: bool) -> None:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        module, tokenizer = load_local(path, dtype, device)
        super().__init__(module, Renderer(tokenizer).end_ids, seed, most_tokens)
        self.frees = frees
        """Whether memory is released while the trainer works (`rollout.free_cache_engine`)."""

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, **more: Any
    ) -> TokenOutput:
        """Continue the ids."""
        if unsupported := [name for name, value in more.items() if value]:
            raise UserError(f"rollout.name={BACKEND} takes only token ids; it was given {', '.join(unsupported)}")
        output = await self.sample(prompt_ids, sampling_params)
        return TokenOutput(
            token_ids=output.ids,
            log_probs=output.logprobs,
            stop_reason="aborted" if output.aborted else "completed",
            num_preempted=0,
            extra_fields={"global_steps": output.step},
        )

    async def abort_all_requests(self, reject_request: bool = False) -> dict[str, Any]:
        """Abort requests in progress; new ones wait."""
        return {"aborted_count": self.hold(), "request_ids": []}

    async def sleep(self) -> None:
        """Release the memory of keys and values; the weights stay."""
        if self.frees:
            self.engine.park()

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Allocate that memory again."""
        if tags is None or "kv_cache" in tags:
            self.engine.resume()

    release_kv_cache, resume_kv_cache = sleep, wake_up

    async def nothing(self, **_: Any) -> None:
        """Do nothing: new weights already drop old keys and values, and there is no profiler."""

    clear_kv_cache = start_profile = stop_profile = nothing


class UpshotReplica(RolloutReplica):  # type: ignore[misc]
    """Starts the server of a rank."""

    async def launch_servers(self) -> None:
        """Start one actor on the node of the rank that it samples for."""
        if self.world_size != 1:
            raise UserError(
                f"rollout.name={BACKEND} has one server a rank; set tensor_model_parallel_size, data_parallel_size and "
                f"pipeline_model_parallel_size to 1 (now {self.world_size} ranks per server), or set rollout.name=vllm"
            )
        platform = get_platform()
        resource = platform.ray_resource_name()
        node, device = await self.workers[0].__ray_call__.remote(
            lambda _: (
                ray.get_runtime_context().get_node_id(),
                ray.get_runtime_context().get_accelerator_ids()[resource][0],
            )
        )
        env_vars = {**dict.fromkeys(platform.ray_noset_envvars(), "1"), **platform.rollout_env_vars()}
        server = ray.remote(RankServer).options(
            name=server_name(self.replica_rank),
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node, soft=False),
            runtime_env={"env_vars": env_vars},
            max_concurrency=self.max_concurrency,
        )
        self._server_handle = server.remote(
            path=self.model_config.path,
            dtype=self.config.dtype,
            device=platform.device_name if platform.device_name == "cpu" else f"{platform.device_name}:{device}",
            seed=int(self.config.seed) + self.replica_rank,
            most_tokens=int(self.config.response_length),
            frees=bool(self.config.free_cache_engine),
        )
        await self._server_handle.nothing.remote()  # raises here if the model cannot be loaded
        self.servers = [self._server_handle]
        self._server_address = f"{BACKEND}:{self.replica_rank}"


class UpshotRollout(BaseRollout):  # type: ignore[misc]
    """In the trainer's rank: sends its weights to its server."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        self.replica_rank = int(os.environ["RANK"]) if replica_rank == -1 else replica_rank

    async def update_weights(
        self,
        weights: Any,
        wire_format: str = "named_tensors",
        global_steps: int | None = None,
        peft_config: Any = None,
        **_: Any,
    ) -> None:
        """Send all weights; a failure is raised after the last tensor, because other ranks wait for each tensor."""
        if wire_format != "named_tensors":
            raise UserError(f"rollout.name={BACKEND} takes whole weights, not {wire_format}; see checkpoint_engine")
        if peft_config is not None:
            raise UserError(f"rollout.name={BACKEND} takes merged LoRA; set actor_rollout_ref.model.lora.merge=true")
        server, failed = ray.get_actor(server_name(self.replica_rank)), None
        await server.begin_weights.remote()
        most = int(self.config.checkpoint_engine.update_weights_bucket_megabytes) << 20
        async for part in parts(ensure_async_iterator(weights), pick_dtype(self.config.dtype, "cpu"), most):
            try:
                if failed is None:
                    await server.load_weights.remote(part)
            except Exception as error:
                failed = error
        if failed is not None:
            raise failed
        await server.end_weights.remote(global_steps)

    async def resume(self, tags: list[str]) -> None:
        """Let the server allocate its memory again."""
        await ray.get_actor(server_name(self.replica_rank)).wake_up.remote(tags=tags)

    async def release(self) -> None:
        """Let the server release its memory."""
        await ray.get_actor(server_name(self.replica_rank)).sleep.remote()


def server_name(replica: int) -> str:
    """The name of a replica's actor; each run has its own Ray namespace."""
    return f"{BACKEND}_server_{replica}"


RolloutReplicaRegistry.register(BACKEND, lambda: UpshotReplica)
_ROLLOUT_REGISTRY[BACKEND, "async"] = f"{__name__}.{UpshotRollout.__name__}"
