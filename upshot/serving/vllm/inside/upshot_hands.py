"""What a vLLM worker can do with new weights: `--worker-extension-cls upshot_hands.WeightsWorker`.

Weights are copied into the model's own tensors, so that nothing moves that captured steps point at. On the CPU vLLM
would multiply by packed copies instead, which such a copy does not reach (and which its own reload leaves stale where
the head is the embedding): packing is switched off when this is imported, which is before the model is made.
"""

from __future__ import annotations

import base64
import contextlib
import json
import pickle
from collections.abc import Iterator
from typing import Any


def pack_nothing() -> None:
    """Have vLLM's CPU kernels read the weights themselves."""
    from vllm import _custom_ops
    from vllm.model_executor.layers import utils
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        _custom_ops._supports_onednn = False
        utils.check_cpu_sgl_kernel = lambda *_: False


class WeightsWorker:
    """Methods that every worker gets; vLLM calls them by `collective_rpc`, with texts as arguments."""

    device: Any
    model_runner: Any
    parallel_config: Any
    rank: int

    def upshot_load(self, packed: str) -> dict[str, Any]:
        """Load packed weights into the model; what the model holds then."""
        transfer = json.loads(packed)
        self.upshot_version = None  # weights that fail half way have no version
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
        """Which version is loaded, the sum of the model's weights, and how many workers share the model."""
        model = self.model_runner.get_model()
        return {
            "version": getattr(self, "upshot_version", None),
            "sum": checksum(model.parameters()),
            "workers": int(self.parallel_config.world_size),
            "rank": int(self.rank),
        }


def from_file(path: str) -> Iterator[tuple[str, Any]]:
    """Names and weights of a safetensors file, which is mapped and not read."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a mapping
            yield name, file.get_tensor(name)


def from_gpu(handles: str, device: int) -> Iterator[tuple[str, Any]]:
    """Names and weights that lie in another process's memory of the same GPU (CUDA IPC)."""
    for name, (rebuild, arguments) in pickle.loads(base64.b64decode(handles)):
        local_arguments = list(arguments)
        local_arguments[6] = device  # the GPU has another number over there
        yield name, rebuild(*local_arguments)


def checksum(tensors: Any) -> str:
    """A sum of all weights as integers: the same however vLLM has put them side by side, another if one bit differs."""
    import torch

    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    total = 0
    for tensor in tensors:
        total += int(tensor.detach().view(kinds[tensor.element_size()]).sum(dtype=torch.int64))
    return str(total % 2**64)


with contextlib.suppress(ImportError):  # not inside vLLM
    pack_nothing()
