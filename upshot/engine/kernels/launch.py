"""Cheaper kernel launches (`Launcher`), and two properties of the GPU that kernels are tuned by.

At every launch, Triton looks up the compiled form by all arguments, which takes longer than a small kernel runs.
`Launcher` keeps compiled forms itself. This matters for the learner and for steps without a CUDA graph.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor


class Launcher:
    """Launches a kernel whose arguments are tensors, then numbers (do_not_specialize), then constexprs."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.compiled: dict[Any, Any] = {}

    def __call__(
        self,
        grid: tuple[int, int, int],
        tensors: tuple[Tensor, ...],
        numbers: tuple[float, ...],
        constants: tuple[int, ...],
        warps: int,
    ) -> None:
        """Launch it on the current stream of the tensors' device, which must be the current one."""
        bits = 0
        for tensor in tensors:
            bits |= tensor.data_ptr()
        # A compiled form depends on constants, device, dtypes, and on whether each address is a multiple of 16.
        form = (constants, warps, tensors[0].device.index, bits % 16 == 0, *[tensor.dtype for tensor in tensors])
        compiled = self.compiled.get(form)
        # With an unaligned address, Triton decides itself: which tensor is unaligned may differ from call to call.
        if compiled is None or bits % 16:
            self.compiled[form] = self.kernel[grid](*tensors, *numbers, *constants, num_warps=warps)
        else:
            compiled[grid](*tensors, *numbers, *constants)


@cache
def processors(device: torch.device) -> int:
    """The number of a GPU's multiprocessors; 4 for the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory per program: 227 KiB on an H200, 99 KiB on an RTX 4090 or 5090, 64 KiB on a T4."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin if device.type == "cuda" else 1 << 30
