"""Transfers weights to vLLM's workers, by the fastest way: CUDA IPC on the same GPU, shared memory, or a file.

vLLM's own transfer routes need vLLM in the learner's process as well, or a GPU. Our worker extension (`inside/`)
supports all three ways in every version of vLLM that has extensions.
"""

from __future__ import annotations

import base64
import json
import pickle
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from upshot.core.errors import UserError
from upshot.serving.vllm.inside.upshot_hands import checksum

Route = Literal["gpu", "memory", "file"]
SHARED = Path("/dev/shm")
"""Files that are memory (Linux)."""
ROUTE_NAMES: dict[Route, str] = {"gpu": "CUDA IPC", "memory": "shared memory", "file": "files in the run folder"}


def choose_route(weights: Mapping[str, Tensor], same_gpu: bool) -> Route:
    """The fastest available way."""
    if same_gpu:
        return "gpu"
    size = sum(weight.numel() * weight.element_size() for weight in weights.values())
    room = SHARED.is_dir() and shutil.disk_usage(SHARED).free > 1.2 * size
    return "memory" if room else "file"


@contextmanager
def folder_for(route: Route, run: Path) -> Iterator[Path]:
    """A temporary folder for one transfer."""
    with tempfile.TemporaryDirectory(prefix="upshot-", dir=SHARED if route == "memory" else run) as folder:
        yield Path(folder)


@contextmanager
def pack_weights(weights: Mapping[str, Tensor], version: str, route: Route, run: Path) -> Iterator[str]:
    """The argument with which workers load the weights; they are available inside the context."""
    if route == "gpu":
        yield json.dumps({"version": version, "route": "gpu", "handles": handles(weights)})
        return
    from safetensors.torch import save_file

    with folder_for(route, run) as folder:
        path = folder / "weights.safetensors"
        save_file({name: weight.detach().cpu().contiguous() for name, weight in weights.items()}, path)
        yield json.dumps({"version": version, "route": "file", "path": str(path)})


def handles(weights: Mapping[str, Tensor]) -> str:
    """Handles of the weights in this process's GPU memory, which another process can open."""
    from torch.multiprocessing.reductions import reduce_tensor

    handles = [(name, reduce_tensor(weight.detach())) for name, weight in weights.items()]
    return base64.b64encode(pickle.dumps(handles)).decode()


def check_arrival(states: Sequence[Mapping[str, Any]], version: str, weights: Mapping[str, Tensor]) -> None:
    """Refuse weights that did not reach every worker or, if one worker holds the whole model, arrived incomplete.

    vLLM joins weights, which does not change their sum; a worker that holds only a part has a different sum.
    """
    message = f"weights of version {version} did not arrive at vLLM"
    workers = int(states[0]["workers"]) if states else 0
    if not states or len(states) != workers:
        raise UserError(f"{message}: {len(states)} of {workers} workers answered")
    behind = [state["rank"] for state in states if state["version"] != version]
    if behind:
        raise UserError(f"{message}: worker {behind[0]} has version {states[behind[0]]['version']}")
    if workers == 1 and states[0]["sum"] != checksum(weights.values()):
        raise UserError(
            f"weights of version {version} changed on their way to vLLM: the sums of sent and loaded weights differ, "
            "because vLLM keeps them in another form (quantized, packed, or in another dtype); set engine: upshot"
        )
