"""The interface to a memory region that several engines on a device use in turns, and the allocation of KV pages.

serving/swap/pool.py implements `SwapSlot`; the runners call `allocate_pages`.
"""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
import torch
from torch import Tensor


class SwapSlot(Protocol):
    """A region of device memory for an engine's weights and pages, which are loaded into it while it is its turn."""

    @property
    def here(self) -> bool:
        """Whether weights and pages are in memory."""
        ...

    @property
    def holds(self) -> bool:
        """Whether no new sequence may start: running ones finish, then another engine gets the region."""
        ...

    def pages(self, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The memory of all pages, at the same address each time."""
        ...

    def enter(self) -> None:
        """Load now, and unload whatever is in the way."""
        ...

    async def turn(self) -> bool:
        """Wait until it is loaded; False: there is nothing left to do."""
        ...


def allocate_pages(
    size: tuple[int, ...], dtype: torch.dtype, device: torch.device, swap_slot: SwapSlot | None
) -> tuple[Tensor, Tensor]:
    """Keys and values of that size, all zeros, in the slot's region if there is one.

    Zeros, because some kernels load whole pages and give entries behind a sequence's end weight 0: 0 × NaN is NaN.
    """
    if swap_slot is None:
        keys, values = (_zeros(size, dtype, device) for _ in range(2))
        return keys, values
    both = swap_slot.pages((2, *size), dtype).zero_()
    return both[0], both[1]


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on the CPU by NumPy, whose memory the system allocates when it is written, while PyTorch writes it all."""
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(size) * dtype.itemsize, np.uint8)).view(dtype).view(size)
