"""The settings that verl needs to run on a CPU, with the reasons."""

from __future__ import annotations

import json
from typing import Any

from upshot.verl.table import ACTOR, BACKEND, CRITIC, MODEL, REF, ROLLOUT

PLATFORM = "cpu"
"""The name of our platform in verl (`platform.py`)."""
ENVIRONMENT = {
    "VERL_USE_EXTERNAL_MODULES": "tests.support.verl_cpu.platform",
    "VERL_PLATFORM": PLATFORM,
    "TRANSFORMERS_VERBOSITY": "error",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_DEDUP_LOGS": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "TORCH_COMPILE_DISABLE": "1",
}
"""The environment of verl's processes and of every raylet of a Ray that is joined; what the user has set is kept."""
_DENSE = "the fused kernels are for GPUs"
_NO_COMPILE = "compiling takes longer than a small run"
_SMALL = "small runs need one"


def list_words(ranks: int, address: str = "") -> list[str]:
    """The arguments for a command line: recipe keys and verl's keys; `address` is that of a Ray to join."""
    told = settings(ranks) | ray_settings(ranks, address)
    return ["model.dtype=float32", *(f"{key}={json.dumps(value)}" for key, (value, _) in told.items())]


def ray_settings(ranks: int, address: str = "") -> dict[str, tuple[Any, str]]:
    """How Ray is joined or started."""
    if address:
        return {"+ray_kwargs.ray_init.address": (address, "joined")}
    return {
        "+ray_kwargs.ray_init.address": ("local", "a Ray of its own, whatever else runs here"),
        "ray_kwargs.ray_init.num_cpus": (16 + 8 * ranks, "logical; with too few verl waits forever"),
        "+ray_kwargs.ray_init.num_gpus": (ranks, "logical: verl places ranks by GPUs"),
        "+ray_kwargs.ray_init.include_dashboard": (False, ""),
    }


def settings(ranks: int) -> dict[str, tuple[Any, str]]:
    """verl's keys ('+' before those that its config does not have), their values, and why."""
    return {
        f"{ROLLOUT}.name": (BACKEND, "our engine"),
        "trainer.device": ("cpu", ""),
        "trainer.nnodes": (1, "this machine"),
        "trainer.n_gpus_per_node": (ranks, "ranks, each a process on the CPU"),
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": (1, _SMALL),
        "data.dataloader_num_workers": (0, _SMALL),
        f"{ROLLOUT}.agent.num_workers": (1, _SMALL),
        f"+{MODEL}.override_config.attn_implementation": ("sdpa", _DENSE),
        f"{MODEL}.use_remove_padding": (False, _DENSE),
        f"+{CRITIC}.model.override_config.attn_implementation": ("sdpa", _DENSE),
        f"{CRITIC}.model.use_remove_padding": (False, _DENSE),
        f"{ACTOR}.use_torch_compile": (False, _NO_COMPILE),
        f"{ACTOR}.fsdp_config.use_torch_compile": (False, _NO_COMPILE),
        f"{REF}.fsdp_config.use_torch_compile": (False, _NO_COMPILE),
        f"{CRITIC}.fsdp.use_torch_compile": (False, _NO_COMPILE),
        f"{ROLLOUT}.enforce_eager": (True, _NO_COMPILE),
        f"{ROLLOUT}.free_cache_engine": (False, "the machine's memory is not shared out by hand"),
        f"+{ROLLOUT}.enable_sleep_mode": (False, "as above, in vLLM's words"),
        f"{ROLLOUT}.load_format": ("auto", "the servers begin with the model's own weights"),
        f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes": (256, "shared memory of a weight sync"),
    }
