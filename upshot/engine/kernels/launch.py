"""Launching a Triton kernel again without asking Triton which of its compiled forms is meant.

Triton looks that up from all arguments at every launch, which takes longer than the small kernels of a small model run.
"""

from __future__ import annotations

from typing import Any

import torch


class Launcher:
    """A kernel whose arguments are tensors, then numbers that it is not specialised on, then constants."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.compiled: dict[Any, Any] = {}

    def __call__(
        self,
        grid: tuple[int, int, int],
        tensors: tuple[torch.Tensor, ...],
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
        found = self.compiled.get(form)
        if found is None or bits % 16:
            self.compiled[form] = self.kernel[grid](*tensors, *numbers, *constants, num_warps=warps)
        else:
            found[grid](*tensors, *numbers, *constants)
