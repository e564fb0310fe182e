"""verl on a CPU: answers what verl asks of an accelerator on a machine without one.

Imported through `VERL_USE_EXTERNAL_MODULES`, where a failing import ends the run with its reason, and not as an entry
point of `verl.plugins`, where verl swallows the error. In force only if `VERL_PLATFORM=cpu` is set. Three things verl
does not ask of its platform, so they are wrapped or set directly, only in processes of this platform: the name of the
process group's backend, pinned memory, and how vLLM keeps its weights.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import torch
import torch.distributed
from torch.distributed.fsdp import CPUOffloadPolicy
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

from tests.support.verl_cpu.settings import PLATFORM

CPU = torch.device("cpu")
TOLD_TO_SERVERS = ("VLLM_", "OMP_NUM_THREADS")
"""Prefixes of the environment variables that rollout servers are started with."""


class Device:
    """`torch.cpu` with what verl asks of `torch.cuda`: memory is that of the process, the rest does nothing."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def current_device(self) -> torch.device:
        """The CPU."""
        return CPU

    def memory_allocated(self, *_: Any) -> int:
        """Bytes that the process holds."""
        return int(psutil.Process().memory_info().rss)

    memory_reserved = max_memory_allocated = max_memory_reserved = memory_allocated

    def mem_get_info(self, *_: Any) -> tuple[int, int]:
        """Free and total bytes of the machine."""
        memory = psutil.virtual_memory()
        return int(memory.available), int(memory.total)

    def get_device_name(self, *_: Any) -> str:
        """The name of the device."""
        return "cpu"

    def get_rng_state(self, *_: Any) -> torch.Tensor:
        """The state of torch's random stream."""
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, *_: Any) -> None:
        """Restore that state."""
        torch.set_rng_state(state)

    def manual_seed(self, seed: int) -> None:
        """Seed torch's random stream."""
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def nothing(self, *_: Any, **__: Any) -> None:
        """For calls without a meaning here."""

    empty_cache = ipc_collect = synchronize = set_device = reset_peak_memory_stats = nothing
    set_per_process_memory_fraction = nothing


@PlatformRegistry.register(platform=PLATFORM)  # type: ignore[untyped-decorator]
class CpuPlatform(PlatformBase):  # type: ignore[misc]
    """The platform 'cpu': gloo, Ray's logical GPUs for verl's placement, no shared device memory."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = Device()

    def is_available(self) -> bool:
        """Always."""
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        """Only if asked for: a machine whose GPU is not visible must not silently train on its CPU."""
        return os.environ.get("VERL_PLATFORM") == PLATFORM

    def current_device(self) -> torch.device:
        """The CPU."""
        return CPU

    def device_count(self) -> int:
        """One."""
        return 1

    def communication_backend_name(self) -> str:
        """Gloo. A worker asks this before it looks for its engine, when verl is fully imported, so our value model is
        listed here."""
        from tests.support.verl_cpu import critic  # noqa: F401

        return "gloo"

    def visible_devices_envvar(self) -> str:
        """What Ray sets for its logical GPUs."""
        return "CUDA_VISIBLE_DEVICES"

    def ray_resource_name(self) -> str:
        """verl looks for GPUs or NPUs by name, so Ray is given GPUs that do not exist."""
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        """The same as for GPUs."""
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def rollout_env_vars(self) -> dict[str, str]:
        """What rollout servers are started with."""
        return {name: value for name, value in os.environ.items() if name.startswith(TOLD_TO_SERVERS)}

    def is_ipc_supported(self) -> bool:
        """Weights go through shared memory."""
        return False

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        """None."""
        return None, None

    def manual_seed(self, seed: int) -> None:
        """Seed torch's random stream."""
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def nothing(self, *_: Any, **__: Any) -> None:
        """For calls without a meaning here."""

    set_device = synchronize = set_allocator_settings = empty_cache = nothing
    profiler_start = profiler_stop = cudart = nothing

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        """No profiler."""
        yield


def settle() -> None:
    """Set the three things that verl does not ask of its platform; once per process."""
    os.environ.setdefault("VERL_ENGINE_DEVICE", "cuda")  # verl's own switch: its FSDP engine is not listed for 'cpu'
    torch.distributed.init_process_group = once_each(torch.distributed.init_process_group)
    CPUOffloadPolicy.__init__ = unpinned(CPUOffloadPolicy.__init__)  # type: ignore[method-assign]
    if "vllm" in sys.modules:  # one of vLLM's processes, which imports this file with verl's extension of its worker
        import vllm._custom_ops as ops

        ops._supports_onednn = False  # prepacked weights cannot be loaded again


def once_each(begin: Any) -> Any:
    """`init_process_group` without repeated backends: verl asks for 'cpu:gloo,cpu:gloo', which torch refuses."""

    @functools.wraps(begin)
    def wrapped(backend: str | None = None, *args: Any, **more: Any) -> Any:
        if backend is not None:
            backend = ",".join(dict.fromkeys(backend.split(",")))
        return begin(backend, *args, **more)

    return wrapped


def unpinned(make: Any) -> Any:
    """`CPUOffloadPolicy` that pins nothing: without an accelerator torch cannot, and verl's reference policy asks."""

    @functools.wraps(make)
    def wrapped(self: Any, pin_memory: bool = False) -> None:
        make(self, pin_memory=False)

    return wrapped


if os.environ.get("VERL_PLATFORM") == PLATFORM:
    settle()
