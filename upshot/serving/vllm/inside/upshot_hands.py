"""Methods of a vLLM worker for new weights: `--worker-extension-cls upshot_hands.WeightsWorker`.

Weights are copied into the model's own tensors, so that the addresses in captured steps stay valid. On the CPU, vLLM
would multiply by packed copies, which would stay stale (after vLLM's own reload as well, if head and embedding are one
tensor). So packing is switched off when this file is imported, which is before the model is created.
"""

from __future__ import annotations

import base64
import contextlib
import json
import pickle
from collections.abc import Iterator
from typing import Any


def pack_nothing() -> None:
    """Make vLLM's CPU kernels read the weights themselves instead of packed copies."""
    from vllm import _custom_ops
    from vllm.model_executor.layers import utils
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        _custom_ops._supports_onednn = False
        utils.check_cpu_sgl_kernel = lambda *_: False


class WeightsWorker:
    """Methods added to every worker; vLLM calls them through `collective_rpc`, with strings as arguments."""

    device: Any
    model_runner: Any
    parallel_config: Any
    rank: int

    def upshot_load(self, packed: str) -> dict[str, Any]:
        """Load packed weights into the model; returns what the model then holds."""
        transfer = json.loads(packed)
        self.upshot_version = None  # if loading fails half-way, the weights have no version
        by_file = transfer["route"] == "file"
        weights = from_file(transfer["path"]) if by_file else from_gpu(transfer["handles"], self.device.index)
        self.model_runner.get_model().load_weights(weights)
        if self.device.type == "cuda":
            import torch

            torch.cuda.synchronize()
            torch.cuda.ipc_collect()
        self.upshot_version = transfer["version"]
        return self.upshot_state()

    def upshot_state(self) -> dict[str, Any]:
        """The loaded version, the sum of the model's weights, and the number of workers that share the model."""
        return {
            "version": getattr(self, "upshot_version", None),
            "sum": checksum(self.model_runner.get_model().parameters()),
            "workers": int(self.parallel_config.world_size),
            "rank": int(self.rank),
        }


def from_file(path: str) -> Iterator[tuple[str, Any]]:
    """Names and weights of a safetensors file, which is mapped instead of read."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a mapping
            yield name, file.get_tensor(name)


def from_gpu(handles: str, device: int) -> Iterator[tuple[str, Any]]:
    """Names and weights that lie in another process's memory of the same GPU (CUDA IPC)."""
    for name, (rebuild, arguments) in pickle.loads(base64.b64decode(handles)):
        local_arguments = list(arguments)
        local_arguments[6] = device  # the GPU may have a different number in this process
        yield name, rebuild(*local_arguments)


def checksum(tensors: Any) -> str:
    """A sum of all weights as integers: independent of how vLLM joins them, but different if one bit differs."""
    import torch

    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    total = 0
    for tensor in tensors:
        total += int(tensor.detach().view(kinds[tensor.element_size()]).sum(dtype=torch.int64))
    return str(total % 2**64)


with contextlib.suppress(ImportError):  # not inside vLLM
    pack_nothing()
