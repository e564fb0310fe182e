"""The memory of an engine that takes turns with others on a device (serving/swap): its pages and its turn."""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
import torch
from torch import Tensor


class SwapSlot(Protocol):
    """A region of memory that the engine has at times: its weights and pages are there, or not loaded."""

    @property
    def here(self) -> bool:
        """Whether weights and pages are in memory."""
        ...

    @property
    def holds(self) -> bool:
        """Whether no new sequence may start: running ones finish, then the engine leaves."""
        ...

    def pages(self, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The memory of all pages, the same each time the engine is here."""
        ...

    def enter(self) -> None:
        """Load now, whatever has to be unloaded for it."""
        ...

    async def turn(self) -> bool:
        """Wait until it is loaded; False: there is nothing left to do."""
        ...


def allocate_pages(
    size: tuple[int, ...], dtype: torch.dtype, device: torch.device, swap_slot: SwapSlot | None
) -> tuple[Tensor, Tensor]:
    """Room for keys and for values, all zeros: in the slot, or wherever there is space."""
    if swap_slot is None:
        keys, values = (_zeros(size, dtype, device) for _ in range(2))
        return keys, values
    both = swap_slot.pages((2, *size), dtype).zero_()  # what others left there may not be numbers
    return both[0], both[1]


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On the CPU, NumPy's: the system hands them out page by page as they are written, and PyTorch writes them all."""
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(size) * dtype.itemsize, np.uint8)).view(dtype).view(size)
