"""How kernels are launched: again without asking Triton which compiled form is meant, and for how many processors.

Triton looks the form up from all arguments at every launch, which takes longer than the small kernels of a small model
run. In a captured step that does not matter; the learner and prompts that are read without a graph feel it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor


class Launcher:
    """A kernel whose arguments are tensors, then numbers that it is not specialised on, then constants."""

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
        # What a compiled form depends on: the constants, and the tensors' dtypes and alignment.
        form = (constants, warps, tensors[0].device.index, bits % 16 == 0, *[tensor.dtype for tensor in tensors])
        compiled = self.compiled.get(form)
        # An odd address may be one that Triton has no form for yet, or another than the last: it looks by itself.
        if compiled is None or bits % 16:
            self.compiled[form] = self.kernel[grid](*tensors, *numbers, *constants, num_warps=warps)
        else:
            compiled[grid](*tensors, *numbers, *constants)


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; for the interpreter, a few."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program may have: 227 KiB on an H200, 99 on an RTX 4090 or 5090, 64 on a T4."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin if device.type == "cuda" else 1 << 30
