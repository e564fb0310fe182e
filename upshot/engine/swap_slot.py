"""Where an engine lives that shares its device's memory with others in turn (serving/swap): its pages and its turn."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class SwapSlot(Protocol):
    """A place in memory that is the engine's now and then: its weights and its pages lie there, or nowhere."""

    @property
    def here(self) -> bool:
        """Whether weights and pages are in memory."""
        ...

    @property
    def holds(self) -> bool:
        """Whether nothing new may begin: what is under way ends, then the engine leaves."""
        ...

    def pages(self, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The memory of all pages, the same each time the engine is here."""
        ...

    def enter(self) -> None:
        """Be here now, whoever has to leave."""
        ...

    async def turn(self) -> bool:
        """Wait to be here; False: there is nothing to do any more."""
        ...


def allocate_pages(
    size: tuple[int, ...], dtype: torch.dtype, device: torch.device, swap_slot: SwapSlot | None
) -> tuple[Tensor, Tensor]:
    """Room for keys and for values, all zeros: in the slot, or wherever there is space."""
    if swap_slot is None:
        keys, values = (torch.zeros(size, dtype=dtype, device=device) for _ in range(2))
        return keys, values
    both = swap_slot.pages((2, *size), dtype).zero_()  # what others left there may not be numbers
    return both[0], both[1]
